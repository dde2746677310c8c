
// What is alive as nested pieces: a row a level, widths are bytes. Choosing a piece makes it as wide as the page.
(() => {
  const ROW = 1.65, THINNEST = 0.0015, DEEPEST = 14, LONGEST = 24;
  const area = document.getElementById("pieces"), up = document.getElementById("up");
  const trail = document.getElementById("trail"), words = document.getElementById("piece");
  const hint = words.textContent;
  let path = [], all = null, arranged = "", waiting = false;

  const here = () => path[path.length - 1];
  const operatorOf = ({ operator, tensor }) => `${operator || "tensor"} ${tensor.replace(/^[^[]*/, "")}`.trim();
  const labelOf = (category) => run.categories.find(({ key }) => key === category).label;
  const paths = {
    module: ({ group, module }) => [...(module ? module.split(".") : [`${labelOf(group.category)}, no module`]), operatorOf(group)],
    line: ({ group, stack }) => [...(stack.length ? [...stack].reverse() : [group.line || "no line recorded"]), operatorOf(group)],
  };

  // Bytes and counts by name, level by level.
  function treeOf(event, pathOf, name) {
    const each = new Map();
    for (const at of aliveAt(all, event)) {
      const kind = all.kind(at), found = each.get(kind) || { bytes: 0, asked: 0, count: 0 };
      found.bytes += all.bytes[at];
      found.asked += all.bytes[at] - all.spare[at];
      found.count += 1;
      each.set(kind, found);
    }
    const sprout = (named) => ({ name: named, bytes: 0, asked: 0, count: 0, by: new Map(), lines: new Set(), branches: new Map() });
    const root = sprout(name);
    for (const [kind, { bytes, asked, count }] of each) {
      let node = root;
      for (const step of [null, ...pathOf(kind).slice(0, LONGEST)]) {
        if (step !== null && !node.branches.has(step)) node.branches.set(step, sprout(step));
        node = step === null ? node : node.branches.get(step);
        node.bytes += bytes;
        node.asked += asked;
        node.count += count;
        node.by.set(kind.group.category, (node.by.get(kind.group.category) || 0) + bytes);
        if (node.lines.size < 2) node.lines.add(kind.group.line);
      }
    }
    return grown(root, new Map());
  }

  // Branches in order, layers that are alike as one; `look` is the same number for what looks the same. What was asked for
  // counts: blocks of equal tensors differ in what the allocator had at hand.
  function grown({ name, bytes, asked, count, by, lines, branches }, looks) {
    const below = merged([...branches.values()].map((branch) => grown(branch, looks)));
    const category = [...by].sort((a, b) => b[1] - a[1])[0]?.[0] || "other";
    const face = `${asked}:${count}:${category}:${below.map((branch) => `${branch.name}=${branch.look}`).sort().join()}`;
    if (!looks.has(face)) looks.set(face, looks.size);
    return { name, bytes, count, category, line: lines.size === 1 ? [...lines][0] : "", branches: below, look: looks.get(face), layers: 1 };
  }

  function merged(branches) {
    if (branches.length < 2 || !branches.every(({ name }) => /^\d+$/.test(name))) return branches.sort((a, b) => b.bytes - a.bytes);
    const alike = new Map();
    for (const branch of branches.sort((a, b) => a.name - b.name)) alike.set(branch.look, [...(alike.get(branch.look) || []), branch]);
    return [...alike.values()].map((same) => (same.length > 1 ? { ...together(same), name: `${spansOf(same)} × ${same.length}`, layers: same.length } : same[0]));
  }

  // Nodes of one look as one.
  function together(same) {
    const sum = (key) => same.reduce((total, node) => total + node[key], 0);
    const branches = same[0].branches.map(({ name }) => together(same.map((node) => node.branches.find((branch) => branch.name === name))));
    return { ...same[0], bytes: sum("bytes"), count: sum("count"), branches };
  }

  // "0–5, 7": the names of layers.
  function spansOf(layers) {
    const spans = [];
    for (const number of layers.map(({ name }) => Number(name))) {
      if (spans.length && spans.at(-1)[1] === number - 1) spans.at(-1)[1] = number;
      else spans.push([number, number]);
    }
    const words = spans.map(([first, last]) => (first === last ? first : `${first}–${last}`));
    return words.length > 4 ? `${words.slice(0, 4).join(", ")}, …` : words.join(", ");
  }

  function open(tree) {
    arranged = tree;
    path = [treeOf(moment.event, paths[tree], tree === "module" ? "all modules" : "all lines")];
    for (const button of document.querySelectorAll("[data-tree]")) button.setAttribute("aria-pressed", button.dataset.tree === tree);
    draw();
  }

  function draw() {
    const pieces = path.map((node, level) => piece(node, level, 0, 1, path.slice(0, level + 1)));
    const deepest = descend(here(), path.length, 0, 1, path, pieces);
    area.replaceChildren(...pieces);
    area.style.height = `${deepest * ROW}rem`;
    up.disabled = path.length === 1;
    trail.textContent = path.slice(1).map((node) => node.name).join(" › ");
  }

  function descend(node, level, left, width, above, pieces) {
    let deepest = level, at = left;
    if (level - path.length >= DEEPEST) return deepest;
    for (const branch of node.branches || []) {
      const share = (width * branch.bytes) / (node.bytes || 1);
      if (share >= THINNEST) {
        const trailTo = [...above, branch];
        pieces.push(piece(branch, level, at, share, trailTo));
        deepest = Math.max(deepest, level + 1, descend(branch, level + 1, at, share, trailTo, pieces));
      }
      at += share;
    }
    return deepest;
  }

  function piece(node, level, left, width, trailTo) {
    const made = make("button", `c-${node.category}`, width > 0.02 ? `${node.name}  ${inWords(node.bytes)}` : "");
    made.type = "button";
    made.classList.toggle("narrow", width <= 0.02);
    made.classList.toggle("around", level < path.length - 1);
    Object.assign(made.style, { left: `${left * 100}%`, width: `${width * 100}%`, top: `${level * ROW}rem` });
    made.tabIndex = level === path.length - 1 ? 0 : -1;
    made.place = { level, left, right: left + width };
    made.dataset.bytes = node.bytes;
    made.title = describe(node);
    made.setAttribute("aria-label", describe(node));
    made.addEventListener("click", () => choose(trailTo));
    for (const kind of ["pointerenter", "focus"]) made.addEventListener(kind, () => (words.textContent = describe(node)));
    return made;
  }

  function describe(node) {
    const share = (100 * node.bytes) / (path[0].bytes || 1);
    const tensors = node.count === 1 ? "1 tensor" : `${node.count.toLocaleString("en")} tensors`;
    const each = node.layers > 1 ? ` · ${inWords(node.bytes / node.layers)} each` : "";
    return `${node.name} · ${inWords(node.bytes)} · ${share.toFixed(1)} % · ${tensors}${each}${node.line ? ` · ${node.line}` : ""}`;
  }

  function choose(trailTo) {
    path = trailTo;
    draw();
    area.children[path.length - 1].focus({ preventScroll: true });
  }

  // The neighbour that an arrow leads to: beside on the same row, around it above, its first below.
  function neighbour(from, key) {
    const { level, left, right } = from.place, all = [...area.children];
    const row = (number) => all.filter((piece) => piece.place.level === number);
    const edge = 1e-9;
    if (key === "ArrowRight") return row(level).find((piece) => piece.place.left >= right - edge);
    if (key === "ArrowLeft") return row(level).findLast((piece) => piece.place.right <= left + edge);
    if (key === "ArrowUp") return row(level - 1).find((piece) => piece.place.right > left + edge);
    return row(level + 1).find((piece) => piece.place.left >= left - edge && piece.place.left < right - edge);
  }

  const out = () => path.length > 1 && choose(path.slice(0, -1));
  up.addEventListener("click", out);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") out();
    if (!event.key.startsWith("Arrow") || !event.target.place) return;
    event.preventDefault();
    neighbour(event.target, event.key)?.focus();
  });
  area.addEventListener("pointerleave", () => (words.textContent = hint));
  for (const button of document.querySelectorAll("[data-tree]")) button.addEventListener("click", () => all && open(button.dataset.tree));
  moment.follow(() => {
    if (waiting || !all) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      open(arranged);
    });
  });
  blocks.then((found) => {
    all = found;
    open(aliveAt(all, run.peak).some((at) => all.kind(at).module) ? "module" : "line");
  }, () => {});
})();
