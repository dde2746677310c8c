
// What is alive at the moment that was chosen: a row for tensors alike, to sort, search and open.
(() => {
  const id = (name) => document.getElementById(name);
  const body = id("alive").tBodies[0], FIRST = 40, MORE = 200, STACKS = 6, LIVES = 12;
  const SVG = new DOMParser().parseFromString("<svg/>", "text/html").querySelector("svg").namespaceURI;
  let all = null, rows = [], sorted = { by: "bytes", down: true }, room = FIRST, open = new Set(), waiting = false;

  function rowsAt(event) {
    const found = new Map();
    for (const at of aliveAt(all, event)) {
      const { group } = all.kind(at);
      let row = found.get(group);
      if (!row) found.set(group, (row = { ...group, group, bytes: 0, each: 0, count: 0, born: all.born[at], members: [] }));
      row.bytes += all.bytes[at];
      row.each = Math.max(row.each, all.bytes[at]);
      row.count += 1;
      row.members.push(at);
    }
    return [...found.values()].map((row) => ({ ...row, tensor: nameOf(row), module: moduleOf(row) }));
  }

  // One layer's own name where the row is of one layer.
  function moduleOf({ module, members }) {
    const first = all.kind(members[0]).module;
    return members.every((at) => all.kind(at).module === first) ? first : module;
  }

  const words = new Map();
  function wordsOf(row) {
    if (!words.has(row.group)) words.set(row.group, [row.category, row.operator, row.module, row.line, row.inner, row.tensor].join("\n").toLowerCase());
    return words.get(row.group);
  }
  const inStack = new Map();
  const stackHas = (stack, word) => {
    const key = inStack.get(stack) || stack.join("\n").toLowerCase();
    inStack.set(stack, key);
    return key.includes(word);
  };
  const matches = (row, wanted) => wanted.every((word) => wordsOf(row).includes(word) || row.members.some((at) => all.kind(at).module.toLowerCase().includes(word) || stackHas(all.kind(at).stack, word)));

  function order(first, second) {
    const [a, b] = [first[sorted.by], second[sorted.by]];
    const way = typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true });
    return (sorted.down ? -way : way) || second.bytes - first.bytes;
  }

  function look() {
    waiting = false;
    rows = rowsAt(moment.event);
    open = new Set([...open].filter((group) => rows.some((row) => row.group === group)));
    title();
    list();
  }

  function later() {
    if (waiting || !all) return;
    waiting = true;
    requestAnimationFrame(look);
  }

  function title() {
    const { event } = moment, made = aliveAt(all, event).at(-1);
    const which = event === run.failure?.event ? "when it died" : event === run.peak ? "at the peak" : `after event ${event.toLocaleString("en")}`;
    id("moment-title").textContent = `Alive ${which}`;
    const bytes = rows.reduce((sum, row) => sum + row.bytes, 0), count = rows.reduce((sum, row) => sum + row.count, 0);
    const line = id("moment-words");
    line.replaceChildren([`event ${event.toLocaleString("en")}`, placeAt(event)].filter(Boolean).join(" · ") + " · ", sized(bytes), ` in ${counted(count, "tensor")}`);
    if (made !== undefined && all.born[made] === event) {
      const { operator, line: at } = all.kind(made).group;
      line.append(" · just made: ", sized(all.bytes[made]), ` by ${[operator, at].filter(Boolean).join(" at ")}`);
    }
    id("event").value = event;
    for (const button of document.querySelectorAll("[data-moment][aria-pressed]")) button.setAttribute("aria-pressed", event === places[button.dataset.moment]());
  }

  function list() {
    const wanted = id("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((row) => matches(row, wanted)).sort(order);
    body.replaceChildren(...found.slice(0, room).flatMap(drawRow));
    const bytes = found.reduce((sum, row) => sum + row.bytes, 0);
    id("found").replaceChildren(wanted.length ? `${counted(found.length, "row")} of ${rows.length.toLocaleString("en")}, ` : `${counted(rows.length, "row")}, `, sized(bytes));
    const hidden = found.slice(room);
    id("more").hidden = !hidden.length;
    id("rest").replaceChildren(...(hidden.length ? [`and ${counted(hidden.length, "more row")}, `, sized(hidden.reduce((sum, row) => sum + row.bytes, 0)), " together"] : []));
    if (all.left_out) id("rest").append(` The ${counted(all.left_out, "smallest block")} of this run are not on the page.`);
  }

  function drawRow(row) {
    const made = make("tr"), at = [...row.members].sort((a, b) => all.born[a] - all.born[b]);
    const cells = [
      [sized(row.bytes)],
      [row.count > 1 ? `× ${row.count.toLocaleString("en")}` : ""],
      [row.count > 1 ? sized(row.each) : ""],
      [make("span", `swatch c-${row.category}`), row.tensor],
      broken(row.operator),
      broken(row.module),
      lineOf(row),
      [opener(row), life(at)],
    ];
    cells.forEach((parts, number) => {
      const cell = make("td", number < 3 ? "n" : "");
      cell.append(...parts);
      made.append(cell);
    });
    made.addEventListener("click", (event) => {
      if (!event.target.closest("button") && !String(getSelection())) toggle(row);
    });
    made.group = row.group;
    return open.has(row.group) ? [made, details(row, at)] : [made];
  }

  // A dotted or underscored name, which may be broken where its parts meet.
  const broken = (name) => name.split(/(?<=[._/])/).filter(Boolean).flatMap((part) => [part, make("wbr")]);

  function lineOf({ line, inner }) {
    const parts = [make("span", "line", line)];
    if (inner) {
      const within = make("span", "line inner");
      within.append(...broken(inner.split("/").slice(-2).join("/")));
      parts.push(within);
    }
    return parts;
  }

  function opener(row) {
    const button = make("button", "open");
    button.type = "button";
    button.setAttribute("aria-expanded", open.has(row.group));
    button.setAttribute("aria-label", `stack and lives of ${row.tensor}, since ${placeAt(row.born) || "setup"}`);
    button.addEventListener("click", () => toggle(row));
    return button;
  }

  function toggle(row) {
    open.has(row.group) ? open.delete(row.group) : open.add(row.group);
    list();
    const buttons = [...body.querySelectorAll("button.open")];
    buttons.find((button) => button.closest("tr").group === row.group)?.focus({ preventScroll: true });
  }

  // A bar as wide as the run, filled where the first few live.
  function life(members) {
    const picture = document.createElementNS(SVG, "svg");
    picture.setAttribute("class", "life");
    picture.setAttribute("viewBox", "0 0 1000 1");
    picture.setAttribute("preserveAspectRatio", "none");
    picture.setAttribute("aria-hidden", "true");
    for (const at of members.slice(0, LIVES)) {
      const bar = document.createElementNS(SVG, "rect"), from = (1000 * all.born[at]) / run.events;
      const to = (1000 * Math.min(all.ends[at], run.events)) / run.events;
      for (const [name, value] of Object.entries({ class: `c-${all.kind(at).group.category}`, x: from, y: 0, height: 1, width: Math.max(to - from, 8) })) bar.setAttribute(name, value);
      picture.append(bar);
    }
    return picture;
  }

  // The whole stack of each way that led here, and each tensor's life.
  function details(row, members) {
    const made = make("tr", "more"), cell = make("td");
    cell.colSpan = 8;
    const ways = new Map();
    for (const at of members) ways.set(all.kind(at).stack, (ways.get(all.kind(at).stack) || 0) + 1);
    const stacks = make("div", "stacks"), lives = make("div", "lives");
    for (const [stack, count] of [...ways].sort((a, b) => b[1] - a[1]).slice(0, STACKS)) {
      stacks.append(make("p", "", stack.length ? `called from, innermost first${ways.size > 1 ? ` (${counted(count, "tensor")})` : ""}` : "No stack was recorded."));
      const frames = make("ol", "stack");
      frames.append(...stack.map((frame) => make("li", "", frame)));
      stacks.append(frames);
    }
    if (ways.size > STACKS) stacks.append(make("p", "", `and ${counted(ways.size - STACKS, "other stack")}`));
    const each = make("ul");
    each.append(...members.slice(0, LIVES).map(lifeInWords));
    if (members.length > LIVES) each.append(make("li", "", `and ${(members.length - LIVES).toLocaleString("en")} more`));
    lives.append(make("p", "", members.length > 1 ? "each of them" : "its life"), each);
    cell.append(stacks, lives);
    made.append(cell);
    return made;
  }

  function lifeInWords(at) {
    const { module } = all.kind(at), end = all.ends[at], words = (event) => `event ${event.toLocaleString("en")}`;
    const ended = run.failure ? "the failure" : "the end", since = placeAt(all.born[at]) || "setup";
    const places = `${since} → ${end === Infinity ? ended : placeAt(end) || "setup"}`;
    const item = make("li", "", `${module ? `${module} · ` : ""}${places} (${words(all.born[at])} to ${end === Infinity ? ended : words(end)}) · `);
    item.append(sized(all.bytes[at]));
    if (all.spare[at]) item.append(", ", sized(all.bytes[at] - all.spare[at]), " asked for");
    return item;
  }

  const places = { peak: () => run.peak, failure: () => run.failure?.event, back: () => moment.event - 1, on: () => moment.event + 1 };
  for (const button of document.querySelectorAll("[data-moment]")) button.addEventListener("click", () => moment.choose(places[button.dataset.moment]()));
  document.querySelector("[data-moment=failure]").hidden = !run.failure;
  id("event").max = run.events - 1;
  id("event").addEventListener("change", () => moment.choose(Number(id("event").value)));
  id("search").addEventListener("input", () => {
    room = FIRST;
    if (all) list();
  });
  id("more").addEventListener("click", () => {
    room += MORE;
    list();
  });
  for (const head of document.querySelectorAll("#alive [data-sort]")) head.firstChild.addEventListener("click", () => {
    const by = head.dataset.sort, isNumber = ["bytes", "count", "each"].includes(by);
    sorted = { by, down: sorted.by === by ? !sorted.down : isNumber };
    for (const other of document.querySelectorAll("#alive [data-sort]")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sorted.down ? "descending" : "ascending");
    list();
  });
  moment.follow(later);
  blocks.then((found) => {
    all = found;
    look();
  }, (error) => (id("moment-words").textContent = `This browser cannot unpack the list of tensors (${error.message}).`));
})();
