
// Zooming and reading the timeline, by pointer and by keyboard.
(() => {
  const id = (name) => document.getElementById(name);
  const plot = id("plot"), overview = id("overview"), chart = id("chart");
  const NARROWEST = Math.min(8, run.events);
  const view = { from: 0, to: run.events };
  let cursor = null, dragged = null, drawn = null, strip = null, waiting = false, all = null;

  function show(from, to) {
    const span = Math.min(Math.max(to - from, NARROWEST), run.events);
    view.from = Math.min(Math.max(Math.round(from), 0), run.events - span);
    view.to = Math.min(Math.round(view.from + span), run.events);
    id("from").value = view.from;
    id("to").value = view.to;
    later();
  }

  function later() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(draw);
  }

  function draw() {
    waiting = false;
    const pointed = drawn && blockUnder();
    drawn = drawPlot(plot, view, cursor?.x ?? null, dragged, pointed);
    strip = drawOverview(overview, view);
    chart.dataset.from = view.from;
    chart.dataset.to = view.to;
    read();
    tell(pointed);
  }

  // The point drawn in the column under the pointer; -1 where there is none.
  function pointUnder() {
    const column = cursor === null ? -1 : Math.floor(cursor.x - drawn.box.x);
    return column >= 0 && column < drawn.shown.length ? drawn.shown[column] : -1;
  }

  // What the pointer is on: a block, or what is reserved and unused.
  function blockUnder() {
    const at = pointUnder();
    if (at < 0 || dragged || !all) return null;
    let height = drawn.top * (1 - (cursor.y - drawn.box.y) / drawn.box.height);
    if (height < 0) return null;
    for (const { key, levels } of run.categories) {
      if (height < levels[at]) return describe(blockAt(all, run.points[at], key, height));
      height -= levels[at];
    }
    return null;
  }

  function describe(at) {
    if (at < 0) return null;
    const { group, module } = all.kind(at), born = all.born[at], end = all.ends[at];
    const maker = [group.operator, module].filter(Boolean).join(" · ");
    const from = placeAt(born) || "setup", until = end === Infinity ? (run.failure ? "the failure" : "the end") : placeAt(end) || "setup";
    return { bytes: all.bytes[at], name: nameOf(group), category: group.category, maker, line: group.line, inner: group.inner, life: `${from} → ${until}`, born, end };
  }

  // A label beside the pointer with the tensor's name and line.
  function tell(pointed) {
    const tip = id("tip");
    tip.hidden = !pointed;
    if (!pointed) return;
    const { bytes, name, category, maker, line, inner, life } = pointed;
    const head = make("strong", "", `${inWords(bytes)}  ${name}`);
    head.prepend(make("span", `swatch c-${category}`));
    tip.replaceChildren(head, ...[maker, line, inner].filter(Boolean).map((words, at) => make("span", at ? "line" : "", words)), make("span", "faint", life));
    besidePointer(tip, plot, cursor);
  }

  // What lies under the pointer, else the moment that was chosen.
  function read() {
    const under = pointUnder(), event = under < 0 ? moment.event : run.points[under];
    const at = pointAt(event), exact = under < 0 && all && !all.left_out ? levelsAt(all, event) : null;
    const levels = run.categories.map(({ key, levels }) => (exact ? exact.levels[key] : levels[at]));
    const allocated = levels.reduce((sum, level) => sum + level, 0), reserved = exact ? exact.reserved : run.reserved[at];
    const place = placeAt(event), line = id("readout");
    line.replaceChildren(make("b", "", `event ${event.toLocaleString("en")}`), place ? ` · ${place}` : "", " · allocated ");
    line.append(sized(allocated), " · reserved ", sized(reserved));
    legend(levels, allocated, reserved);
    chart.setAttribute("aria-valuemin", 0);
    chart.setAttribute("aria-valuemax", run.events - 1);
    chart.setAttribute("aria-valuenow", moment.event);
    chart.setAttribute("aria-valuetext", line.textContent);
  }

  function legend(levels, allocated, reserved) {
    const entries = run.categories.map(({ key, label }, at) => entry(`c-${key}`, label, levels[at])).reverse();
    entries.push(entry("c-fragmentation", "reserved, unused", reserved - allocated), entry("rule", "reserved", reserved));
    id("legend").replaceChildren(...entries);
  }

  function entry(className, label, bytes) {
    const made = make("li");
    const value = make("b");
    value.append(sized(bytes));
    made.append(make("span", `swatch ${className}`), label, value);
    return made;
  }

  function zoom(factor, around = inView() ? moment.event : (view.from + view.to) / 2) {
    show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  }

  const inView = () => moment.event >= view.from && moment.event < view.to;

  // To another moment; the view follows it.
  function go(by) {
    moment.choose(moment.event + by);
    if (inView()) return;
    const span = view.to - view.from, from = moment.event < view.from ? moment.event - span * 0.1 : moment.event - span * 0.9;
    show(Math.min(Math.max(from, 0), run.events - span), Math.min(Math.max(from, 0), run.events - span) + span);
  }

  function around(event) {
    const half = Math.max(run.events / 40, NARROWEST);
    moment.choose(event);
    show(event - half, event + half);
  }

  const toPeak = () => around(run.peak);
  const toFailure = () => run.failure && around(run.failure.event);
  const whole = () => show(0, run.events);
  const zooms = { whole, peak: toPeak, in: () => zoom(0.5), out: () => zoom(2) };
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", zooms[button.dataset.zoom]);

  const tenth = () => Math.max(1, Math.round((view.to - view.from) / 10));
  const keys = { ArrowLeft: (far) => go(far ? -tenth() : -1), ArrowRight: (far) => go(far ? tenth() : 1), f: toFailure, F: toFailure, "+": zooms.in, "=": zooms.in, "-": zooms.out, Home: whole, p: toPeak, P: toPeak };
  chart.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key](event.shiftKey);
  });

  const typed = () => {
    const from = Number(id("from").value), to = Number(id("to").value);
    if (to > from) show(from, to);
  };
  for (const input of [id("from"), id("to")]) {
    input.max = run.events;
    input.addEventListener("change", typed);
  }

  const placeOf = (canvas, event) => event.clientX - canvas.getBoundingClientRect().left;
  const eventAt = (x) => view.from + ((x - drawn.box.x) / drawn.box.width) * (view.to - view.from);
  const momentAt = () => drawn.box.x + (drawn.box.width * (moment.event + 0.5 - view.from)) / (view.to - view.from);

  // A click chooses the moment, a drag zooms; the line of the moment is dragged along.
  let carried = false;
  plot.addEventListener("pointerdown", (event) => {
    const x = placeOf(plot, event);
    plot.setPointerCapture(event.pointerId);
    carried = inView() && Math.abs(x - momentAt()) < 5;
    if (!carried) dragged = [x, x];
  });
  plot.addEventListener("pointermove", (event) => {
    cursor = { x: placeOf(plot, event), y: event.clientY - plot.getBoundingClientRect().top };
    if (carried) moment.choose(eventAt(cursor.x) - 0.5);
    if (dragged) dragged[1] = cursor.x;
    plot.style.cursor = carried || (inView() && Math.abs(cursor.x - momentAt()) < 5) ? "ew-resize" : "";
    later();
  });
  plot.addEventListener("pointerup", (event) => {
    const [first, last] = (dragged || [0, 0]).map(eventAt).sort((a, b) => a - b);
    const far = dragged && Math.abs(dragged[1] - dragged[0]) > 4, near = dragged && !far;
    dragged = null;
    carried = false;
    if (far) show(first, last);
    cursor = { x: placeOf(plot, event), y: event.clientY - plot.getBoundingClientRect().top };
    const under = near ? pointUnder() : -1;
    if (under >= 0) moment.choose(run.points[under]);
    later();
  });
  plot.addEventListener("pointercancel", () => (dragged = carried = null));
  plot.addEventListener("pointerleave", () => {
    cursor = null;
    later();
  });
  plot.addEventListener("dblclick", whole);
  plot.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return;
    event.preventDefault();
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, eventAt(placeOf(plot, event)));
  }, { passive: false });

  slideWindow(overview, view, run.events, () => strip, show);

  const steps = run.steps.filter(([, , name]) => name !== "0").slice(0, 2000);
  if (steps.length > 1) {
    id("step").append(...[make("option", "", "…"), ...steps.map(([, , name]) => make("option", "", name))]);
    id("step-choice").hidden = false;
    id("step").addEventListener("change", () => {
      const chosen = steps[id("step").selectedIndex - 1];
      if (chosen) show(chosen[0], chosen[1]);
    });
  }
  id("kept").textContent = run.whole
    ? `All ${run.events.toLocaleString("en")} events are here.`
    : `${run.points.length.toLocaleString("en")} of ${run.events.toLocaleString("en")} events are here: the highest and lowest of every stretch.`;

  id("key-failure").hidden = !run.failure;
  moment.follow(later);
  blocks.then((found) => {
    all = found;
    later();
  }, () => {});
  new ResizeObserver(later).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  show(0, run.events);
})();
