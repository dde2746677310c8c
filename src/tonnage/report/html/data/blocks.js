
// Every block of the run, unpacked once; and which moment of the run is looked at.
const moment = (() => {
  const told = [];
  let event = run.peak;
  return {
    get event() {
      return event;
    },
    choose(to) {
      event = Math.min(Math.max(Math.round(to), 0), run.events - 1);
      for (const tell of told) tell();
    },
    follow: (tell) => told.push(tell),
  };
})();

const blocks = unpack("blocks").then((text) => {
  const found = JSON.parse(text);
  const born = sums(found.born);
  const ends = Float64Array.from(found.life, (life, at) => (life ? born[at] + life : Infinity));
  const groups = found.groups.map(([category, operator, module, line, inner, tensor]) => {
    const word = (number) => found.words[number];
    return { category: word(category), operator: word(operator), module: word(module), line: word(line), inner: word(inner), tensor: word(tensor) };
  });
  const stacks = found.stacks.map((stack) => stack.map((number) => found.words[number]));
  const kinds = found.kinds.map(([group, module, stack]) => ({ group: groups[group], module: found.words[module], stack: stacks[stack] }));
  const kind = (at) => kinds[found.kind[at]];
  return { ...found, born, ends, kinds, kind, heldAt: sums(found.held_at), held: sums(found.held) };
});

// The blocks that are alive after an event. The last answer is kept: the chart, the table and the pieces ask the same.
const aliveAt = (() => {
  let last = { event: -1, alive: [] };
  return ({ born, ends }, event) => {
    if (last.event === event) return last.alive;
    const alive = [], after = lastUpTo(born, event) + 1;
    for (let at = 0; at < after; at += 1) if (ends[at] > event) alive.push(at);
    last = { event, alive };
    return alive;
  };
})();

// Bytes by category and reserved bytes after an event, exact between the chart's points too.
function levelsAt(all, event) {
  const levels = Object.fromEntries(run.categories.map(({ key }) => [key, 0]));
  for (const at of aliveAt(all, event)) levels[all.kind(at).group.category] += all.bytes[at];
  const last = lastUpTo(all.heldAt, event);
  return { levels, reserved: last < 0 ? 0 : all.held[last] };
}

// The block at a height within its category, oldest at the bottom.
function blockAt(all, event, category, height) {
  const after = lastUpTo(all.born, event) + 1;
  let floor = 0;
  for (let at = 0; at < after; at += 1) {
    if (all.ends[at] <= event || all.kind(at).group.category !== category) continue;
    floor += all.bytes[at];
    if (floor > height) return at;
  }
  return -1;
}

function placeAt(event) {
  const step = spanAt(run.steps, event), phase = spanAt(run.phases, event);
  return [step && step !== "0" ? `step ${step}` : "", phase].filter(Boolean).join(", ");
}

const nameOf = ({ tensor, category }) => tensor || run.categories.find(({ key }) => key === category).label;
const counted = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
