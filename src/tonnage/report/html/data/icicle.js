
// The peak as nested pieces: a row a level, widths are bytes. Choosing a piece makes it as wide as the page.
(() => {
  const ROW = 1.65, THINNEST = 0.0015, DEEPEST = 14;
  const area = document.getElementById("pieces"), up = document.getElementById("up");
  const trail = document.getElementById("trail"), words = document.getElementById("piece");
  const hint = words.textContent;
  let path = [];

  const here = () => path[path.length - 1];

  function open(tree) {
    path = [data.trees[tree]];
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
    return `${node.name} · ${inWords(node.bytes)} · ${share.toFixed(1)} % of the peak · ${tensors}`;
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
  for (const button of document.querySelectorAll("[data-tree]")) button.addEventListener("click", () => open(button.dataset.tree));
  open(data.tree);
})();
