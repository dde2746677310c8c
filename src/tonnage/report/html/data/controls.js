
// Zooming and reading the timeline, by pointer and by keyboard.
(() => {
  const id = (name) => document.getElementById(name);
  const plot = id("plot"), overview = id("overview"), chart = id("chart");
  const NARROWEST = Math.min(8, run.events);
  const view = { from: 0, to: run.events };
  let cursor = null, dragged = null, drawn = null, strip = null, waiting = false;

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
    drawn = drawPlot(plot, view, cursor, dragged);
    strip = drawOverview(overview, view);
    chart.dataset.from = view.from;
    chart.dataset.to = view.to;
    read();
  }

  // What lies under the pointer, else the highest point in view.
  function read() {
    const column = cursor === null ? -1 : Math.floor(cursor - drawn.box.x);
    const inside = column >= 0 && column < drawn.shown.length;
    let at = inside ? drawn.shown[column] : drawn.shown[0];
    if (!inside) for (const other of drawn.shown) if (run.allocated[other] > run.allocated[at]) at = other;
    const event = run.points[at];
    const step = spanAt(run.steps, event), phase = spanAt(run.phases, event);
    const words = [inside ? "" : "highest here:", `event ${event.toLocaleString("en")}`];
    const place = [step && step !== "0" ? `step ${step}` : "", phase].filter(Boolean).join(", ");
    const line = id("readout");
    line.replaceChildren(words.filter(Boolean).join(" "), place ? ` · ${place}` : "", " · allocated ");
    line.append(sized(run.allocated[at]), " · reserved ", sized(run.reserved[at]));
    legend(at);
  }

  function legend(at) {
    const entries = run.categories.map(({ key, label, levels }) => entry(`c-${key}`, label, levels[at])).reverse();
    entries.push(entry("c-fragmentation", "reserved, unused", run.reserved[at] - run.allocated[at]));
    entries.push(entry("rule", "reserved", run.reserved[at]));
    id("legend").replaceChildren(...entries);
  }

  function entry(className, label, bytes) {
    const made = make("li");
    const value = make("b");
    value.append(sized(bytes));
    made.append(make("span", `swatch ${className}`), label, value);
    return made;
  }

  function zoom(factor, around = (view.from + view.to) / 2) {
    show(around - (around - view.from) * factor, around + (view.to - around) * factor);
  }

  function move(share) {
    const by = Math.round((view.to - view.from) * share) || Math.sign(share);
    const from = Math.min(Math.max(view.from + by, 0), run.events - (view.to - view.from));
    show(from, from + (view.to - view.from));
  }

  function toPeak() {
    const half = Math.max(run.events / 40, NARROWEST);
    show(run.peak - half, run.peak + half);
  }

  const whole = () => show(0, run.events);
  const zooms = { whole, peak: toPeak, in: () => zoom(0.5), out: () => zoom(2) };
  for (const button of document.querySelectorAll("[data-zoom]")) button.addEventListener("click", zooms[button.dataset.zoom]);

  const keys = { ArrowLeft: () => move(-0.1), ArrowRight: () => move(0.1), "+": zooms.in, "=": zooms.in, "-": zooms.out, Home: whole, p: toPeak, P: toPeak };
  chart.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
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

  plot.addEventListener("pointerdown", (event) => {
    plot.setPointerCapture(event.pointerId);
    dragged = [placeOf(plot, event), placeOf(plot, event)];
  });
  plot.addEventListener("pointermove", (event) => {
    cursor = placeOf(plot, event);
    if (dragged) dragged[1] = cursor;
    later();
  });
  plot.addEventListener("pointerup", () => {
    const [first, last] = (dragged || [0, 0]).map(eventAt).sort((a, b) => a - b);
    const far = dragged && Math.abs(dragged[1] - dragged[0]) > 4;
    dragged = null;
    if (far) show(first, last);
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
    zoom((event.deltaY || event.deltaX) > 0 ? 1.25 : 0.8, eventAt(placeOf(plot, event)));
  }, { passive: false });

  let held = null;
  const onStrip = (x) => ((x - strip.box.x) / strip.box.width) * run.events;
  overview.addEventListener("pointerdown", (event) => {
    overview.setPointerCapture(event.pointerId);
    const x = placeOf(overview, event);
    const near = (edge) => Math.abs(x - edge) < 7;
    const part = near(strip.left) ? "from" : near(strip.right) ? "to" : x > strip.left && x < strip.right ? "both" : "new";
    held = { part, at: onStrip(x), from: view.from, to: view.to };
  });
  overview.addEventListener("pointermove", (event) => {
    if (!held) return;
    const now = onStrip(placeOf(overview, event));
    if (held.part === "both") {
      const from = Math.min(Math.max(held.from + now - held.at, 0), run.events - (held.to - held.from));
      show(from, from + held.to - held.from);
    } else {
      const fixed = { from: held.to, to: held.from, new: held.at }[held.part];
      show(Math.max(Math.min(fixed, now), 0), Math.min(Math.max(fixed, now), run.events));
    }
  });
  for (const end of ["pointerup", "pointercancel"]) overview.addEventListener(end, () => (held = null));

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

  new ResizeObserver(later).observe(chart);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  show(0, run.events);
})();
