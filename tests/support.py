"""Recordings made by hand, through the real allocator."""

from dataclasses import replace

from tonnage.allocator import AllocatorSettings, CachingAllocator, OutOfMemory
from tonnage.hardware import find_gpu
from tonnage.ledger import Category
from tonnage.recording import Allocation, Header, Mark, Recording, SegmentEvent
from tonnage.recording import FailedRequest as RecordedOutOfMemory
from tonnage.recording.replay import as_its_card_saw_it

MIB = 2**20


class Run:
    """A run as a person would write it down: phases, allocations, frees."""

    def __init__(self, gpu: str = "h200", capacity_bytes: int | None = None, settings: str = "", **header) -> None:
        card = find_gpu(gpu)
        self.header = Header(
            gpu=card.key,
            gpu_name=card.name,
            capacity_bytes=capacity_bytes or card.memory_bytes,
            torch_modelled="2.11.0",
            torch_installed="2.13.0+cpu",
            settings=settings,
        )
        self.header = replace(self.header, **header)
        self.recording = Recording(self.header)
        self._next = 0
        self._phase, self._step = "", 0
        parsed = AllocatorSettings.parse(settings)
        self.allocator = CachingAllocator(self.header.capacity_bytes, parsed, self.header.overhead_bytes, self._segment)
        self._blocks = {}

    def _take(self) -> int:
        self._next += 1
        return self._next - 1

    def _segment(self, action: str, address: int, size: int, stream: int) -> None:
        if action != "oom":
            self.recording.segments.append(SegmentEvent(self._take(), action, address, size, stream))

    def phase(self, name: str) -> None:
        self._phase = name
        self.recording.marks.append(Mark(self._next, "phase", name))

    def step(self, number: int) -> None:
        self._step = number
        self.recording.marks.append(Mark(self._next, "step", str(number)))

    def empty_cache(self) -> None:
        self.recording.marks.append(Mark(self._next, "empty_cache"))
        self.allocator.empty_cache()

    def alloc(self, size: int, category: Category = Category.OTHER, **words) -> Allocation:
        block = self.allocator.malloc(size, words.get("stream", 0))
        made = Allocation(
            index=len(self.recording.allocations),
            address=block.address,
            requested_bytes=size,
            block_bytes=block.size,
            stream=words.pop("stream", 0),
            born=self._take(),
            category=category,
            phase=self._phase,
            step=self._step,
            **words,
        )
        self._blocks[made.index] = block
        self.recording.allocations.append(made)
        return made

    def free(self, *allocations: Allocation) -> None:
        for a in allocations:
            self.allocator.free(self._blocks.pop(a.index))
            a.died = self._take()

    def dies(self, error: OutOfMemory, **words) -> Recording:
        """The run ended here."""
        shortage = error.shortage
        self.recording.header.outcome = "oom"
        self.recording.oom = RecordedOutOfMemory(
            requested_bytes=shortage.requested_bytes,
            free_bytes=shortage.free_bytes,
            allocated_bytes=shortage.allocated_bytes,
            reserved_bytes=shortage.reserved_bytes,
            phase=self._phase,
            step=self._step,
            message=shortage.message,
            **words,
        )
        return self.recording


def training_run(*, batch: int = 8, layers: int = 4, steps: int = 2, gpu: str = "h200", **header) -> Recording:
    """A small language model's training as a recording; ends in out-of-memory where the card is too small."""
    run = Run(gpu, arguments=("--batch", str(batch)), script="train.py", **header)
    try:
        _train(run, batch, layers, steps)
    except OutOfMemory as error:
        return run.dies(error, line="train.py:87", operator="linear", module="lm_head")
    return run.recording


def gone_on(gpu: str = "4090", **words) -> Recording:
    """A training that a card cannot hold, with all of it known."""
    whole = training_run(**words)
    card = find_gpu(gpu)
    whole.header = replace(
        whole.header, gpu=card.key, gpu_name=card.name, capacity_bytes=card.memory_bytes,
        overhead_bytes=600 * 2**20, overhead_parts={"context": 500 * 2**20, "cublas": 100 * 2**20},
    )  # fmt: skip
    return as_its_card_saw_it(whole)


def _train(run: Run, batch: int, layers: int, steps: int) -> None:
    def tensor(category: Category, operator: str, module: str, shape: tuple[int, ...], line: str, dtype="float32"):
        width = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype]
        size = width
        for extent in shape:
            size *= extent
        words = {"operator": operator, "module": module, "shape": shape, "line": f"train.py:{line}", "dtype": dtype}
        return run.alloc(size, category, **words)

    weights = [("lm_head", (50304, 1024)), *((f"layers.{i}.mlp", (4096, 1024)) for i in range(layers))]
    for module, shape in weights:
        tensor(Category.PARAMETERS, "to", module, shape, "60")
    states = []
    for step in range(1, steps + 1):
        run.step(step)
        run.phase("forward")
        saved = [tensor(Category.INPUTS, "to", "", (batch, 1024), "84", "int64")]
        for i in range(layers):
            for operator in ("linear", "gelu", "add"):
                saved.append(
                    tensor(Category.ACTIVATIONS, operator, f"layers.{i}.mlp", (batch, 1024, 4096), "87", "bfloat16")
                )
        saved.append(tensor(Category.ACTIVATIONS, "linear", "lm_head", (batch, 1024, 50304), "87", "bfloat16"))
        saved.append(tensor(Category.ACTIVATIONS, "log_softmax", "", (batch, 1024, 50304), "88"))
        run.phase("backward")
        gradients = []
        for module, shape in weights:
            gradients.append(tensor(Category.GRADIENTS, "mm", module, shape, "89"))
            run.free(saved.pop())
        run.free(*saved)
        run.phase("optimizer")
        if not states:
            for module, shape in weights:
                states += [tensor(Category.OPTIMIZER_STATES, "zeros_like", module, shape, "90") for _ in range(2)]
        temporaries = [tensor(Category.WORKSPACE, "_foreach_sqrt", module, shape, "90") for module, shape in weights]
        run.free(*temporaries)
        run.free(*gradients)


def climbing_run(steps: int = 5, capacity_bytes: int | None = None, each_bytes: int = 64 * MIB) -> Recording:
    """A training that keeps so much of every step, up to its end or its death."""
    run = Run(capacity_bytes=capacity_bytes)
    run.alloc(64 * MIB, Category.PARAMETERS)
    for step in range(1, steps + 1):
        run.step(step)
        run.phase("forward")
        run.alloc(each_bytes, Category.ACTIVATIONS, line="train.py:31", operator="addmm")
        passing = run.alloc(32 * MIB, Category.ACTIVATIONS, line="train.py:30", operator="mul")
        run.phase("backward")
        run.free(passing)
    return run.recording
