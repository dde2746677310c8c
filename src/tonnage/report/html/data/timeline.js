
// The run as levels at the points that were kept, and how a stretch of it is drawn.
const run = (() => {
  const { timeline, failure } = data;
  const categories = timeline.categories.map(({ key, label, levels }) => ({ key, label, levels: sums(levels) }));
  const points = sums(timeline.points);
  const allocated = new Float64Array(points.length);
  for (const { levels } of categories) for (let at = 0; at < levels.length; at += 1) allocated[at] += levels[at];
  if (failure) EDGE.right = 40;
  return { ...timeline, failure, categories, points, allocated, reserved: sums(timeline.reserved) };
})();

// The last point at or before an event.
const pointAt = (event) => Math.max(lastUpTo(run.points, event), 0);

// For each column of pixels the point to show, highest of those within, so that no peak is lost at any width.
function columnsOf(from, to, count) {
  const shown = new Int32Array(count), reserved = new Float64Array(count);
  let at = pointAt(from);
  for (let column = 0; column < count; column += 1) {
    const end = from + ((to - from) * (column + 1)) / count;
    let best = at;
    let held = run.reserved[at];
    while (at + 1 < run.points.length && run.points[at + 1] < end) {
      at += 1;
      if (run.allocated[at] > run.allocated[best]) best = at;
      held = Math.max(held, run.reserved[at]);
    }
    shown[column] = best;
    reserved[column] = held;
  }
  return { shown, reserved };
}

function highestOf(shown, reserved) {
  return reserved.reduce((most, held, column) => Math.max(most, held, run.allocated[shown[column]]), 1);
}

function spanAt(spans, event) {
  let low = 0, high = spans.length - 1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (spans[middle][1] <= event) low = middle + 1;
    else if (spans[middle][0] > event) high = middle - 1;
    else return spans[middle][2];
  }
  return "";
}

function drawPlot(canvas, view, cursor, dragged, pointed) {
  const { pen, width, height } = sheet(canvas);
  const box = { x: EDGE.left, y: EDGE.top, width: Math.max(width - EDGE.left - EDGE.right, 10), height: height - EDGE.top - EDGE.bottom };
  const count = Math.floor(box.width);
  const { shown, reserved } = columnsOf(view.from, view.to, count);
  const failure = run.failure && view.to === run.events ? run.failure : null;
  const highest = Math.max(highestOf(shown, reserved), failure ? failure.reserved + failure.asked : 0);
  const showsCeiling = run.ceiling > 0 && run.ceiling <= 1.6 * highest;
  const most = showsCeiling ? Math.max(highest, run.ceiling) : highest;
  const top = most * (1 + 26 / box.height);
  const y = (bytes) => box.y + box.height * (1 - bytes / top);
  const x = (event) => box.x + (box.width * (event - view.from)) / (view.to - view.from);
  drawGrid(pen, box, ticks(top, 6), y);
  drawUnused(pen, box, shown, reserved, y);
  drawStack(pen, box, shown, y);
  drawSteps(pen, box, view, x);
  drawLevel(pen, box, reserved, y);
  if (showsCeiling) drawCeiling(pen, box, y(run.ceiling), failure ? "left" : "right");
  drawSpans(pen, box, box.y + box.height + 4, run.phases, view, x);
  drawSpans(pen, box, box.y + box.height + 22, run.steps, view, x, "step ");
  drawEvents(pen, box, view, height);
  if (pointed) drawLife(pen, box, view, x, pointed);
  drawMoment(pen, box, view, x);
  if (failure) drawFailure(pen, box, failure, y);
  drawPeak(pen, box, view, x, y);
  drawPointer(pen, box, cursor, dragged);
  return { box, shown, reserved, top, words: pen.words };
}

// Words beside a mark, on the side that has room, a line higher or lower if other words stand there; the paper shows
// through behind them.
function drawLabel(pen, box, left, height, words, name) {
  const wide = pen.measureText(words).width + 10;
  const after = left + 4, before = left - wide - 4;
  const starts = after + wide + 4 > box.x + box.width ? [before] : before > box.x ? [after, before] : [after];
  const spots = [0, -20, 20, -40, 40].flatMap((by) => starts.map((start) => ({ left: start, right: start + wide, top: height + by - 9, bottom: height + by + 9 })));
  const crossed = (spot) => pen.words.some((other) => spot.left < other.right && spot.right > other.left && spot.top < other.bottom && spot.bottom > other.top);
  const spot = spots.find((each) => each.top >= 0 && !crossed(each)) ?? spots[0];
  pen.words.push(spot);
  pen.fillStyle = colour("paper");
  pen.globalAlpha = 0.85;
  pen.fillRect(spot.left, spot.top, wide, 18);
  pen.globalAlpha = 1;
  pen.fillStyle = colour(name);
  pen.textAlign = "left";
  pen.textBaseline = "middle";
  pen.fillText(words, spot.left + 5, spot.top + 9);
}

function drawPeak(pen, box, view, x, y) {
  if (run.peak < view.from || run.peak >= view.to || !run.allocated.length) return;
  const bytes = run.allocated[pointAt(run.peak)], middle = x(run.peak + 0.5), tip = y(bytes) - 2;
  if (!bytes) return;
  pen.fillStyle = colour("ink");
  pen.beginPath();
  pen.moveTo(middle, tip);
  pen.lineTo(middle - 6, tip - 9);
  pen.lineTo(middle + 6, tip - 9);
  pen.fill();
  drawLabel(pen, box, middle + (middle > box.x + box.width * 0.7 ? -4 : 4), tip - 8, `peak ${inWords(bytes)}`, "ink");
}

// The request that failed, on top of what was held then, to the right of the last event.
function drawFailure(pen, box, failure, y) {
  const left = box.x + box.width + 4, wide = EDGE.right - 10;
  const above = y(failure.reserved + failure.asked), below = Math.max(y(failure.reserved), above + 3);
  pen.fillStyle = pen.strokeStyle = colour("bad");
  pen.globalAlpha = 0.22;
  pen.fillRect(left, above, wide, below - above);
  pen.globalAlpha = 1;
  pen.lineWidth = 1.5;
  pen.strokeRect(left, above, wide, below - above);
  pen.beginPath();
  pen.moveTo(left - 4, y(0));
  pen.lineTo(left - 4, above);
  pen.stroke();
  const words = `died here: asked for ${inWords(failure.asked)}, ${inWords(failure.free)} free`;
  drawLabel(pen, { x: 0, width: left + wide }, left + wide, Math.max(above - 13, box.y + 6), words, "bad");
}

function drawMoment(pen, box, view, x) {
  if (moment.event < view.from || moment.event >= view.to) return;
  const middle = Math.round(x(moment.event + 0.5));
  pen.fillStyle = colour("accent");
  pen.fillRect(middle - 1, box.y, 2, box.height + 4);
  pen.beginPath();
  pen.arc(middle, box.y + box.height + 2, 5, 0, 7);
  pen.fill();
}

// How long the block under the pointer lives, along the floor of the chart.
function drawLife(pen, box, view, x, { born, end }) {
  const left = Math.max(x(born), box.x), right = Math.min(x(Math.min(end, run.events)), box.x + box.width);
  pen.fillStyle = colour("ink");
  pen.fillRect(left, box.y + box.height - 5, Math.max(right - left, 2), 5);
}

function drawStack(pen, box, shown, y) {
  const floor = new Float64Array(shown.length);
  for (const { key, levels } of run.categories) {
    pen.fillStyle = colour(`c-${key}`);
    pen.beginPath();
    for (let column = 0; column < shown.length; column += 1) {
      const below = y(floor[column]);
      floor[column] += levels[shown[column]];
      const above = y(floor[column]);
      if (below - above > 0.05) pen.rect(box.x + column, above, 1.02, below - above);
    }
    pen.fill();
  }
}

function drawUnused(pen, box, shown, reserved, y) {
  pen.fillStyle = colour("c-fragmentation");
  pen.beginPath();
  for (let column = 0; column < shown.length; column += 1) {
    const above = y(reserved[column]), below = y(run.allocated[shown[column]]);
    if (below > above) pen.rect(box.x + column, above, 1.02, below - above);
  }
  pen.fill();
}

function drawLevel(pen, box, levels, y) {
  pen.strokeStyle = colour("ink");
  pen.lineWidth = 1.5;
  pen.beginPath();
  levels.forEach((level, column) => {
    pen.lineTo(box.x + column, y(level));
    pen.lineTo(box.x + column + 1, y(level));
  });
  pen.stroke();
}

function drawSteps(pen, box, view, x) {
  const within = run.steps.filter(([start]) => start > view.from && start < view.to);
  if (within.length > box.width / 16) return;
  pen.fillStyle = colour("strong");
  for (const [start] of within) pen.fillRect(Math.round(x(start)), box.y, 1, box.height);
}

// A strip of phases or steps; a name stands where there is room for it. What is narrower than a pixel is not drawn.
function drawSpans(pen, box, height, spans, view, x, prefix = "") {
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  spans.forEach(([start, end, name], number) => {
    if (end <= view.from || start >= view.to) return;
    const left = Math.max(x(start), box.x), right = Math.min(x(end), box.x + box.width);
    if (right - left < 0.5) return;
    pen.fillStyle = colour(number % 2 ? "phase-a" : "phase-b");
    pen.fillRect(left, height, right - left, 16);
    const words = name === "0" && prefix ? "" : prefix + name;
    if (pen.measureText(words).width + 6 > right - left) return;
    pen.fillStyle = colour("ink");
    pen.fillText(words, (left + right) / 2, height + 8.5);
  });
}

function drawEvents(pen, box, view, height) {
  pen.fillStyle = colour("faint");
  pen.textBaseline = "bottom";
  pen.textAlign = "left";
  pen.fillText(`event ${Math.round(view.from).toLocaleString("en")}`, box.x, height - 2);
  pen.textAlign = "right";
  pen.fillText(Math.round(view.to).toLocaleString("en"), box.x + box.width, height - 2);
}

function drawPointer(pen, box, cursor, dragged) {
  if (dragged) {
    pen.fillStyle = colour("accent");
    pen.globalAlpha = 0.25;
    pen.fillRect(Math.min(...dragged), box.y, Math.abs(dragged[1] - dragged[0]), box.height);
    pen.globalAlpha = 1;
  } else if (cursor !== null) {
    pen.fillStyle = colour("ink");
    pen.fillRect(Math.round(cursor), box.y, 1, box.height);
  }
}

function drawOverview(canvas, view) {
  const { pen, width, height } = sheet(canvas);
  const box = { x: EDGE.left, y: 2, width: Math.max(width - EDGE.left - EDGE.right, 10), height: height - 4 };
  const { shown, reserved } = columnsOf(0, run.events, Math.floor(box.width));
  const highest = highestOf(shown, reserved);
  const y = (bytes) => box.y + box.height * (1 - bytes / highest);
  pen.fillStyle = colour("panel");
  pen.fillRect(box.x, box.y, box.width, box.height);
  drawStack(pen, box, shown, y);
  return drawWindow(pen, box, view, run.events);
}
