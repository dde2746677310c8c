
// The launches of one step on their streams; times are in tenths of a microsecond.
const TICKS = { s: 1e7, ms: 1e4, µs: 10 };

function inTime(ticks) {
  const unit = ticks >= TICKS.s ? "s" : ticks >= TICKS.ms ? "ms" : "µs";
  return `${(ticks / TICKS[unit]).toFixed(ticks >= 100 * TICKS[unit] ? 0 : ticks >= 10 * TICKS[unit] ? 1 : 2)} ${unit}`;
}

const intoStep = (ticks) => (ticks >= TICKS.ms ? `${(ticks / TICKS.ms).toFixed(2)} ms` : inTime(ticks));

function stepOf(text) {
  const found = JSON.parse(text);
  const streams = found.streams.map(({ name, gaps, lengths, label }) => {
    const starts = new Float64Array(gaps.length), ends = new Float64Array(gaps.length);
    for (let at = 0, now = 0; at < gaps.length; at += 1) {
      starts[at] = now + gaps[at];
      now = ends[at] = starts[at] + lengths[at];
    }
    return { name, starts, ends, label };
  });
  const labels = found.labels.map(([name, kind, colour]) => ({ name, kind, colour }));
  return { ...found, labels, streams, colours: [...new Set(labels.map(({ colour }) => colour))] };
}

// The longest launch within a stretch of a stream, and how many there are.
function longestIn({ starts, ends }, from, to) {
  let best = -1, count = 0;
  for (let at = Math.max(lastUpTo(starts, from), 0); at < starts.length && starts[at] < to; at += 1) {
    if (ends[at] < from) continue;
    count += 1;
    if (best < 0 || ends[at] - starts[at] > ends[best] - starts[best]) best = at;
  }
  return { best, count };
}

// A row of boxes on whole pixels: one that ended within a pixel would mix two colours into a third. What is narrower, and the
// ends of boxes, are summed by column and colour.
function drawStream(pen, row, step, stream, view) {
  const count = Math.floor(row.width), scale = row.width / (view.to - view.from), wide = [];
  const shares = new Map(step.colours.map((name) => [name, new Float64Array(count)]));
  const { starts, ends, label } = stream;
  for (let at = Math.max(lastUpTo(starts, view.from), 0); at < starts.length && starts[at] < view.to; at += 1) {
    const left = Math.max((starts[at] - view.from) * scale, 0), right = Math.min((ends[at] - view.from) * scale, row.width);
    if (right <= left) continue;
    const { name, colour } = step.labels[label[at]], share = shares.get(colour), isWide = right - left >= 2;
    if (isWide) wide.push({ left: Math.round(left), right: Math.round(right), name, colour });
    const last = Math.min(Math.ceil(right), count) - 1, stride = isWide ? Math.max(last - Math.floor(left), 1) : 1;
    for (let column = Math.floor(left); column <= last; column += stride) share[column] += Math.min(right, column + 1) - Math.max(left, column);
  }
  pen.fillStyle = colour("c-waiting");
  pen.fillRect(row.x, row.y, row.width, row.height);
  drawShares(pen, row, shares);
  drawBoxes(pen, row, wide);
}

function drawShares(pen, row, shares) {
  const floor = new Float64Array(Math.floor(row.width));
  for (const [name, share] of shares) {
    pen.fillStyle = colour(`c-${name}`);
    pen.beginPath();
    share.forEach((part, column) => {
      if (!part) return;
      floor[column] = Math.min(floor[column] + part, 1);
      pen.rect(row.x + column, row.y + row.height * (1 - floor[column]), 1.02, row.height * part);
    });
    pen.fill();
  }
}

// Names stand where there is room.
function drawBoxes(pen, row, boxes) {
  const paints = new Map(), paper = colour("paper");
  for (const { left, right, colour: key } of boxes) {
    if (!paints.has(key)) paints.set(key, colour(`c-${key}`));
    pen.fillStyle = paints.get(key);
    pen.fillRect(row.x + left, row.y, right - left, row.height);
    if (right - left < 6) continue;
    pen.fillStyle = paper;
    pen.fillRect(row.x + right - 0.5, row.y, 0.5, row.height);
  }
  if (row.height < 28) return;
  pen.fillStyle = colour("on-colour");
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (const { left, right, name } of boxes) {
    if (right - left > 24 && pen.measureText(name).width + 8 < right - left) pen.fillText(name, row.x + (left + right) / 2, row.y + row.height / 2 + 0.5);
  }
}

// 1, 2 or 5 times a power of ten, in the unit that suits the step.
function drawTimes(pen, box, view, height) {
  const unit = view.to >= TICKS.s ? "s" : view.to >= TICKS.ms ? "ms" : "µs", span = (view.to - view.from) / TICKS[unit];
  const rough = span / Math.max(box.width / 75, 2), ten = 10 ** Math.floor(Math.log10(rough));
  const size = ten * [1, 2, 5, 10].find((times) => times * ten >= rough), digits = Math.max(0, -Math.floor(Math.log10(size) + 1e-9));
  pen.textAlign = "center";
  pen.textBaseline = "bottom";
  for (let number = Math.ceil(view.from / TICKS[unit] / size); number * size * TICKS[unit] <= view.to; number += 1) {
    const x = box.x + (box.width * (number * size * TICKS[unit] - view.from)) / (view.to - view.from), words = `${(number * size).toFixed(digits)} ${unit}`;
    pen.fillStyle = colour("strong");
    pen.fillRect(Math.round(x), box.y + box.height, 1, 5);
    pen.fillStyle = colour("faint");
    pen.fillText(words, Math.min(x, box.x + box.width - pen.measureText(words).width / 2), height - 2);
  }
}

// The rows of the chart, one below the other.
function rowsOf(canvas, streams, gap, edge) {
  const width = Math.max(canvas.clientWidth - EDGE.left - edge.right, 10), each = (canvas.clientHeight - edge.top - edge.bottom) / streams.length;
  return streams.map((stream, at) => ({ stream, x: EDGE.left, y: edge.top + at * each, width, height: each - gap }));
}

function drawStep(canvas, step, view, cursor, dragged) {
  const { pen, height } = sheet(canvas);
  const rows = rowsOf(canvas, step.streams, 4, { top: 4, bottom: 24, right: 8 });
  const box = { x: rows[0].x, y: rows[0].y, width: rows[0].width, height: rows.at(-1).y + rows.at(-1).height - rows[0].y };
  for (const row of rows) {
    drawStream(pen, row, step, row.stream, view);
    pen.fillStyle = colour("faint");
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    pen.fillText(row.stream.name, row.x - 8, row.y + row.height / 2);
  }
  drawTimes(pen, box, view, height);
  drawPointer(pen, box, cursor && cursor.x >= box.x && cursor.x <= box.x + box.width ? cursor.x : null, dragged);
  return { box, rows };
}

function drawStepOverview(canvas, step, view) {
  const { pen } = sheet(canvas);
  const rows = rowsOf(canvas, step.streams, 1, { top: 2, bottom: 1, right: 8 });
  for (const row of rows) drawStream(pen, row, step, row.stream, { from: 0, to: step.length });
  return drawWindow(pen, { ...rows[0], height: canvas.clientHeight - 4 }, view, step.length);
}

// Zooming and reading the step, as the run's chart is.
function showStep(step) {
  const id = (name) => document.getElementById(name);
  const chart = id("step-chart"), plot = id("step-plot"), overview = id("step-overview"), tip = id("step-tip");
  const view = { from: 0, to: step.length }, NARROWEST = Math.min(200, step.length);
  let cursor = null, dragged = null, drawn = null, strip = null, waiting = false;

  function show(from, to) {
    const span = Math.min(Math.max(to - from, NARROWEST), step.length);
    view.from = Math.min(Math.max(from, 0), step.length - span);
    view.to = view.from + span;
    later();
  }

  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    waiting = false;
    drawn = drawStep(plot, step, view, cursor, dragged);
    strip = drawStepOverview(overview, step, view);
    chart.dataset.from = view.from;
    chart.dataset.to = view.to;
    id("step-view").textContent = view.to - view.from < step.length ? `${inTime(view.to - view.from)} from ${intoStep(view.from)} on` : "";
    tell();
  }

  const timeAt = (x) => view.from + ((x - drawn.box.x) / drawn.box.width) * (view.to - view.from);

  // A label beside the pointer: the launch, or how long nothing runs.
  function tell() {
    const row = cursor && !dragged && cursor.x >= drawn.box.x && cursor.x <= drawn.box.x + drawn.box.width && drawn.rows.find(({ y, height }) => cursor.y >= y - 2 && cursor.y < y + height + 2);
    tip.hidden = !row;
    if (!row) return;
    const { starts, ends, label } = row.stream, { best, count } = longestIn(row.stream, timeAt(cursor.x - 0.5), timeAt(cursor.x + 0.5));
    if (best < 0) tellGap(row.stream);
    else {
      const { name, kind, colour: key } = step.labels[label[best]], head = make("strong", "", `${inTime(ends[best] - starts[best])}  ${name}`);
      head.prepend(make("span", `swatch c-${key}`));
      const others = count > 1 ? [make("span", "", `and ${counted(count - 1, "shorter one")} in this pixel`)] : [];
      tip.replaceChildren(head, make("span", "", `${kind} · ${row.stream.name}`), ...others, make("span", "faint", `${intoStep(starts[best])} into the step`));
    }
    besidePointer(tip, plot, cursor);
  }

  function tellGap({ starts, ends }) {
    const at = lastUpTo(starts, timeAt(cursor.x)), from = at < 0 ? 0 : ends[at], to = at + 1 < starts.length ? starts[at + 1] : step.length;
    const why = step.streams.length > 1 ? "nothing runs on this stream" : to - from > 20 ? "waiting for the host" : "between two kernels";
    const head = make("strong", "", `${inTime(to - from)}  ${why}`);
    head.prepend(make("span", "swatch c-waiting"));
    tip.replaceChildren(head, make("span", "faint", `${intoStep(from)} into the step`));
  }

  const middle = () => (view.from + view.to) / 2;
  const zoom = (factor, around = middle()) => show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
  const whole = () => show(0, step.length);
  const zooms = { whole, in: () => zoom(0.5), out: () => zoom(2) };
  for (const button of document.querySelectorAll("[data-step-zoom]")) button.addEventListener("click", zooms[button.dataset.stepZoom]);
  const keys = { ArrowLeft: () => pan(-0.1), ArrowRight: () => pan(0.1), "+": zooms.in, "=": zooms.in, "-": zooms.out, Home: whole };
  chart.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });

  const placeOf = (event) => ({ x: event.clientX - plot.getBoundingClientRect().left, y: event.clientY - plot.getBoundingClientRect().top });
  plot.addEventListener("pointerdown", (event) => {
    plot.setPointerCapture(event.pointerId);
    dragged = [placeOf(event).x, placeOf(event).x];
  });
  plot.addEventListener("pointermove", (event) => {
    cursor = placeOf(event);
    if (dragged) dragged[1] = cursor.x;
    later();
  });
  plot.addEventListener("pointerup", () => {
    const [first, last] = (dragged || [0, 0]).map(timeAt).sort((a, b) => a - b), far = dragged && Math.abs(dragged[1] - dragged[0]) > 4;
    dragged = null;
    if (far) show(first, last);
    later();
  });
  plot.addEventListener("pointercancel", () => (dragged = null));
  plot.addEventListener("pointerleave", () => {
    cursor = null;
    later();
  });
  plot.addEventListener("dblclick", whole);
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, timeAt(placeOf(event).x));
  }, { passive: false });
  slideWindow(overview, view, step.length, () => strip, show);

  if (step.streams.length > 1) {
    plot.style.height = `${step.streams.length * 38 + 28}px`;
    overview.style.height = `${Math.max(step.streams.length * 8 + 4, 26)}px`;
  }
  if (step.left_out) id("step-left-out").textContent = `Not on the page: ${counted(step.left_out, "kernel")}, the shortest.`;
  new ResizeObserver(later).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  show(0, step.length);
  return step;
}

const stepShown = document.getElementById("spans") ? unpack("spans").then((text) => showStep(stepOf(text))) : Promise.resolve(null);
stepShown.catch((error) => (document.getElementById("step-keys").textContent = `This browser cannot unpack the step's launches (${error.message}).`));
