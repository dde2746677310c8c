"""Hold our copies of CUDA's structures against NVIDIA's headers: python tools/check_cuda_layouts.py --cuda 13 FOLDER...

The stand-in libraries are compiled without NVIDIA's headers: src/tonnage/virtual/driver/native/cuda_abi.h repeats the
structures that cross the boundary. This compiles that file and NVIDIA's headers with debug information, reads the size of
each structure and the offset and size of each member from it, and names every difference. Structures are matched by
name; CUDA_MAJOR says to our file which version of CUDA is meant.

With --print it lists NVIDIA's structures instead: the ones named, or those that the stand-ins may meet.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

OURS = Path(__file__).parents[1] / "src/tonnage/virtual/driver/native/cuda_abi.h"
HEADERS = "cuda.h cuda_runtime_api.h cublas_v2.h cublasLt.h cudnn.h cufft.h cusparseLt.h nccl.h nvml.h cupti.h cufile.h".split()
SHOWN = """
cudaDeviceProp cudaFuncAttributes cudaPointerAttributes cudaUUID_t cudaIpcMemHandle_t cudaIpcEventHandle_t
cudaMemLocation cudaMemAccessDesc cudaMemPoolProps cudaMemPoolPtrExportData cudaMemcpy3DParms cudaMemcpy3DPeerParms cudaPitchedPtr cudaExtent cudaPos
cudaLaunchConfig_t cudaLaunchAttribute cudaLaunchAttributeValue cudaKernelNodeParams cudaKernelNodeParamsV2 cudaMemcpyNodeParams cudaMemsetParams
cudaMemsetParamsV2 cudaHostNodeParams cudaHostNodeParamsV2 cudaMemAllocNodeParams cudaMemAllocNodeParamsV2 cudaMemFreeNodeParams cudaEventRecordNodeParams
cudaEventWaitNodeParams cudaChildGraphNodeParams cudaConditionalNodeParams cudaGraphNodeParams cudaGraphEdgeData cudaGraphInstantiateParams
cudaGraphExecUpdateResultInfo cudaGraphKernelNodeUpdate cudaAccessPolicyWindow cudaChannelFormatDesc cudaResourceDesc cudaTextureDesc
CUmemAllocationProp CUmemLocation CUmemAccessDesc CUmemPoolProps CUlaunchConfig CUlaunchAttribute CUlaunchAttributeValue CUuuid CUdevprop
CUmulticastObjectProp CUipcMemHandle CUipcEventHandle CUtensorMap CUDA_MEMCPY2D CUDA_MEMCPY3D CUDA_KERNEL_NODE_PARAMS_v2 CUDA_MEMSET_NODE_PARAMS
CUDA_HOST_NODE_PARAMS CUDA_MEM_ALLOC_NODE_PARAMS CUDA_GRAPH_INSTANTIATE_PARAMS CUgraphExecUpdateResultInfo CUctxCreateParams CUexecAffinityParam
cublasLtMatmulHeuristicResult_t cublasLtMatmulAlgo_t cublasLtMatrixLayoutOpaque_t cublasLtMatmulDescOpaque_t cublasLtMatmulPreferenceOpaque_t
cusparseLtHandle_t cusparseLtMatDescriptor_t cusparseLtMatmulDescriptor_t cusparseLtMatmulAlgSelection_t cusparseLtMatmulPlan_t
ncclUniqueId ncclConfig_t ncclSimInfo_t cudnnFraction_t
nvmlMemory_t nvmlMemory_v2_t nvmlBAR1Memory_t nvmlUtilization_t nvmlPciInfo_t nvmlProcessInfo_t nvmlProcessInfo_v1_t nvmlProcessInfo_v2_t
nvmlProcessDetailList_t nvmlProcessDetail_v1_t nvmlGpuFabricInfo_t nvmlGpuFabricInfoV_t nvmlFieldValue_t nvmlC2cModeInfo_v1_t
CUpti_ActivityAPI CUpti_CallbackData CUfileError_t CUfileDescr_t CUfileDrvProps_t
""".split()


@dataclass
class Entry:
    """One entry of the debug information: a type or a member of one."""

    tag: str
    attributes: dict[str, str] = field(default_factory=dict)
    children: list["Entry"] = field(default_factory=list)


@dataclass(frozen=True)
class Member:
    name: str
    offset: int
    size_bytes: int


Layouts = dict[str, tuple[int, list[Member]]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--cuda", choices=["12", "13"], required=True, help="the major version that the headers belong to"
    )
    parser.add_argument("--print", action="store_true", help="list NVIDIA's structures, compare nothing")
    parser.add_argument("--only", nargs="+", default=SHOWN, metavar="NAME", help="with --print: these structures")
    parser.add_argument("folders", nargs="+", type=Path, help="folders of NVIDIA's headers, searched in order")
    options = parser.parse_args()
    found = [name for name in HEADERS if any((folder / name).exists() for folder in options.folders)]
    if not found:
        sys.exit(
            f"None of NVIDIA's headers is in {', '.join(map(str, options.folders))}. Give a folder with cuda.h in it."
        )
    theirs = layouts("#include <stdalign.h>\n" + "".join(f"#include <{name}>\n" for name in found), options.folders)
    if options.print:
        for name in options.only:
            print(describe(name, theirs[name]) if name in theirs else f"{name}: not in these headers\n")
    else:
        sys.exit(compare(layouts(f'#define CUDA_MAJOR {options.cuda}\n#include "{OURS}"\n', []), theirs, options.cuda))


def layouts(source: str, folders: list[Path]) -> Layouts:
    """Compile headers and list the structures that they define: size in bytes and members, by name."""
    with tempfile.TemporaryDirectory() as scratch:
        compiled = Path(scratch) / "layouts.o"
        flags = ["-g", "-w", "-fno-eliminate-unused-debug-types", *(f"-I{folder}" for folder in folders)]
        subprocess.run(["cc", "-x", "c", "-", "-c", *flags, "-o", str(compiled)], input=source, text=True, check=True)
        listing = ["readelf", "--debug-dump=info", "-W", str(compiled)]
        dump = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    entries = parse(dump)
    found = {}
    for entry in entries.values():
        name, struct = entry.attributes.get("name"), resolve(entry, entries)
        # A structure that is only declared has no size.
        if name and struct and "byte_size" in struct.attributes and entry.tag not in ("const_type", "volatile_type"):
            found[name] = (int(struct.attributes["byte_size"], 0), members(struct, entries))
    return found


def parse(dump: str) -> dict[str, Entry]:
    """Read readelf's listing of debug information into a tree, by position."""
    entries: dict[str, Entry] = {}
    path: list[Entry] = []
    for line in dump.splitlines():
        if start := re.match(r"\s*<(\w+)><(\w+)>: Abbrev Number: \d+ \(DW_TAG_(\w+)\)", line):
            entry = Entry(start[3])
            entries[start[2]] = entry
            del path[int(start[1], 16) :]
            if path:
                path[-1].children.append(entry)
            path.append(entry)
        elif path and (attribute := re.match(r"\s*<\w+>\s+DW_AT_(\w+)\s*:\s*(?:\([^)]*\)\s*:?\s*)*(.*)", line)):
            # "(ref4) <0x2a>, long int", "(data1) 7\t(unsigned)", "(strp) (offset: 0x5): name"
            path[-1].attributes[attribute[1]] = re.split(r"\t|, ", attribute[2].strip())[0]
    return entries


def resolve(entry: Entry | None, entries: dict[str, Entry]) -> Entry | None:
    """Follow typedefs and qualifiers to a structure or union; None where there is another type at the end."""
    while entry and entry.tag in ("typedef", "const_type", "volatile_type"):
        entry = target(entry, entries)
    return entry if entry and entry.tag in ("structure_type", "union_type") else None


def target(entry: Entry, entries: dict[str, Entry]) -> Entry | None:
    return entries.get(entry.attributes.get("type", "").strip("<>").removeprefix("0x"))


def size_of(entry: Entry | None, entries: dict[str, Entry]) -> int:
    if entry is None:
        return 0
    if "byte_size" in entry.attributes:
        return int(entry.attributes["byte_size"], 0)
    size = size_of(target(entry, entries), entries)
    for bounds in entry.children if entry.tag == "array_type" else ():
        size *= int(bounds.attributes.get("upper_bound", "-1"), 0) + 1
    return size


def members(struct: Entry, entries: dict[str, Entry], base: int = 0, prefix: str = "") -> list[Member]:
    """List members with their offset from the start, those of inner structures after the member that holds them."""
    listed = []
    for child in struct.children:
        if child.tag != "member":
            continue
        kind = target(child, entries)
        offset = base + int(child.attributes.get("data_member_location", "0"), 0)
        name = child.attributes.get("name", "")
        if name:
            listed.append(Member(prefix + name, offset, size_of(kind, entries)))
        if inner := resolve(kind, entries):
            listed += members(inner, entries, offset, prefix + (f"{name}." if name else ""))
    return listed


def describe(name: str, layout: tuple[int, list[Member]]) -> str:
    size, listed = layout
    return f"{name}: {size} bytes\n" + "".join(f"{m.offset:6} {m.size_bytes:6} {m.name}\n" for m in listed)


def compare(ours: Layouts, theirs: Layouts, cuda: str) -> int:
    """Print how our structures differ from NVIDIA's of one version of CUDA; return the exit status."""
    unknown, wrong = [], []
    for name, (size, listed) in sorted(ours.items()):
        # NVIDIA ends the names of some structures in C's habits.
        twin = next((twin for twin in (name, f"{name}_t", f"{name}_st") if twin in theirs), None)
        if twin is None:
            unknown.append(name)
            continue
        if size != theirs[twin][0]:
            wrong.append(f"{name}: {size} bytes; NVIDIA has {theirs[twin][0]}")
        # Ours may leave members out, at the end or as padding; what it names must be where NVIDIA has it.
        places = {member.name: member for member in theirs[twin][1]}
        for member in listed:
            place = places.get(member.name)
            if place != member and not re.match(r"reserved|padding|unused", member.name.rpartition(".")[2]):
                has = f"it at {place.offset}, {place.size_bytes} bytes" if place else "no such member"
                wrong.append(f"{name}.{member.name} is at {member.offset}, {member.size_bytes} bytes; NVIDIA has {has}")
    print("".join(f"{line}\n" for line in wrong), end="")
    print("".join(f"{name}: NVIDIA has no such structure\n" for name in unknown), end="")
    print(f"{len(ours) - len(unknown)} structures compared with CUDA {cuda}, {len(wrong)} differences")
    return 1 if wrong or unknown or not ours else 0


if __name__ == "__main__":
    main()
