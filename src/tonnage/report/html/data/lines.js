
// Lines of several runs or ranks over each other: every stretch (a step) has its place, as wide as the rank with most events in it.
(() => {
  const id = (name) => document.getElementById(name);
  const plot = id("plot");
  const levels = (differences) => [...sums(differences)];
  const lines = data.lines.map((line) => ({
    ...line,
    stretches: line.stretches.map(({ name, events, allocated, reserved }) => ({ name, events, allocated: levels(allocated), reserved: levels(reserved) })),
  }));
  const axis = axisOf(lines);
  let level = "allocated", chosen = null, pointed = null, cursor = null, waiting = false;

  function axisOf(all) {
    const events = new Map();
    const longest = [...all].sort((a, b) => b.stretches.length - a.stretches.length);
    for (const { stretches } of longest) for (const each of stretches) events.set(each.name, Math.max(events.get(each.name) || 0, each.events));
    const total = [...events.values()].reduce((sum, count) => sum + count, 0) || 1;
    let from = 0;
    return new Map([...events].map(([name, count]) => [name, { name, from, to: (from += count / total) }]));
  }

  // Eight colours, then the same with dashes: neighbours are told apart whatever their number.
  const PAINTS = { odd: "odd", typical: "ink", dies: "bad" }, COLOURS = 8, DASHES = [[], [7, 4], [2, 3], [9, 3, 2, 3]];
  const paint = (line, number) => colour(PAINTS[line.role] || `line-${number % COLOURS}`);
  const dashes = (line, number) => (line.role ? [] : DASHES[Math.floor(number / COLOURS) % DASHES.length]);
  const highest = () => Math.max(1, ...lines.flatMap((line) => line.stretches.flatMap((each) => each[level])));

  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    waiting = false;
    const { pen, width, height } = sheet(plot);
    if (width < 20) return;
    const box = { x: EDGE.left, y: EDGE.top, width: Math.max(width - EDGE.left - EDGE.right, 10), height: height - EDGE.top - 26 };
    const most = highest(), showsCeiling = data.ceiling > 0 && data.ceiling <= 1.6 * most;
    const top = (showsCeiling ? Math.max(most, data.ceiling) : most) * 1.06;
    const y = (bytes) => box.y + box.height * (1 - bytes / top);
    drawGrid(pen, box, ticks(top, 5), y);
    drawStretches(pen, box);
    if (showsCeiling) drawCeiling(pen, box, y(data.ceiling));
    const front = pointed ?? chosen;
    const order = lines.map((line, number) => ({ line, number })).sort((a, b) => weight(a, front) - weight(b, front));
    for (const { line, number } of order) {
      pen.globalAlpha = front === null || front === number ? 1 : 0.3;
      pen.lineWidth = front === number ? 3 : line.role ? 2.2 : 1.4;
      pen.strokeStyle = paint(line, number);
      pen.setLineDash(dashes(line, number));
      drawLine(pen, box, line, y);
    }
    pen.setLineDash([]);
    pen.globalAlpha = 1;
    if (cursor) {
      pen.fillStyle = colour("strong");
      pen.fillRect(Math.round(cursor.x), box.y, 1, box.height);
    }
    plot.drawn = { box, y };
    read();
  }

  const weight = ({ line, number }, front) => (number === front ? 3 : { dies: 2, odd: 2, typical: 1 }[line.role] || 0);

  function drawStretches(pen, box) {
    pen.textBaseline = "top";
    pen.textAlign = "center";
    let number = 0;
    for (const { name, from, to } of axis.values()) {
      const left = box.x + box.width * from, right = box.x + box.width * to;
      if (right - left >= 0.5) {
        pen.fillStyle = colour((number += 1) % 2 ? "phase-a" : "phase-b");
        pen.fillRect(left, box.y + box.height + 4, right - left, 16);
      }
      if (pen.measureText(name).width + 6 > right - left) continue;
      pen.fillStyle = colour("ink");
      pen.fillText(name, (left + right) / 2, box.y + box.height + 6);
    }
  }

  function drawLine(pen, box, line, y) {
    pen.beginPath();
    for (const each of line.stretches) {
      const { from, to } = axis.get(each.name), levels = each[level];
      levels.forEach((bytes, at) => {
        const left = box.x + box.width * (from + ((to - from) * at) / levels.length);
        const right = box.x + box.width * (from + ((to - from) * (at + 1)) / levels.length);
        pen.lineTo(left, y(bytes));
        pen.lineTo(right, y(bytes));
      });
    }
    pen.stroke();
  }

  // What a line says at a share of the axis; null where it has ended.
  function levelAt(line, share) {
    for (const each of line.stretches) {
      const { from, to } = axis.get(each.name);
      if (share >= from && share < to) return each[level][Math.floor(((share - from) / (to - from)) * each[level].length)];
    }
    return null;
  }

  function peakOf(line) {
    return Math.max(0, ...line.stretches.flatMap((each) => each[level]));
  }

  function read() {
    const words = id("readout");
    const front = pointed ?? chosen;
    words.replaceChildren();
    if (cursor && plot.drawn) {
      const share = (cursor.x - plot.drawn.box.x) / plot.drawn.box.width;
      const here = [...axis.values()].find(({ from, to }) => share >= from && share < to);
      if (!here) return;
      const line = lines[front], bytes = line && levelAt(line, share);
      words.append(here.name);
      if (line && bytes !== null) words.append(` · ${line.name}: ${level} `, sized(bytes));
      return;
    }
    const number = front ?? lines.reduce((best, line, at) => (peakOf(line) > peakOf(lines[best]) ? at : best), 0);
    if (lines[number]) words.append(front === null ? "highest: " : "", `${lines[number].name}: ${level} `, sized(peakOf(lines[number])), " at most");
  }

  // The line nearest to the pointer, if one is near.
  function nearest() {
    const { box, y } = plot.drawn, share = (cursor.x - box.x) / box.width;
    let best = null, least = 28;
    lines.forEach((line, number) => {
      const bytes = levelAt(line, share);
      const away = bytes === null ? Infinity : Math.abs(y(bytes) - cursor.y);
      if (away < least) [best, least] = [number, away];
    });
    return best;
  }

  function legend() {
    id("lines").replaceChildren(...lines.map((line, number) => {
      const made = make("li"), button = make("button"), swatch = make("span", "swatch");
      button.type = "button";
      button.setAttribute("aria-pressed", chosen === number);
      swatch.style.background = dashes(line, number).length ? `repeating-linear-gradient(90deg, ${paint(line, number)} 0 4px, transparent 4px 6px)` : paint(line, number);
      button.append(swatch, line.name, line.word);
      button.addEventListener("click", () => {
        chosen = chosen === number ? null : number;
        legend();
        id("lines").children[number].firstChild.focus({ preventScroll: true });
        later();
      });
      for (const [kind, to] of [["pointerenter", number], ["pointerleave", null]]) button.addEventListener(kind, () => {
        pointed = to;
        later();
      });
      made.append(button);
      return made;
    }));
  }

  plot.addEventListener("pointermove", (event) => {
    const place = plot.getBoundingClientRect();
    cursor = { x: event.clientX - place.left, y: event.clientY - place.top };
    pointed = plot.drawn ? nearest() : null;
    later();
  });
  plot.addEventListener("pointerleave", () => {
    cursor = pointed = null;
    later();
  });
  for (const button of document.querySelectorAll("[data-level]")) button.addEventListener("click", () => {
    level = button.dataset.level;
    for (const other of document.querySelectorAll("[data-level]")) other.setAttribute("aria-pressed", other === button);
    later();
  });
  if (!lines.length) return;
  legend();
  new ResizeObserver(later).observe(plot);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    legend();
    later();
  });
})();
