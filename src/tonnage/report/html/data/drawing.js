
// What every chart is drawn with.
const EDGE = { left: 74, right: 8, top: 8, bottom: 62 };

function sheet(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  pen.words = []; // where words stand already: left, right, top, bottom
  return { pen, width, height };
}

// 1, 2 or 5 times a power of ten of a unit: at most `count` lines.
function ticks(top, count) {
  const power = top >= 2 ** 30 ? 3 : top >= 2 ** 20 ? 2 : top >= 2 ** 10 ? 1 : 0;
  const unit = 1024 ** power, rough = top / unit / count;
  const ten = 10 ** Math.floor(Math.log10(rough));
  const step = ten * [1, 2, 5, 10].find((times) => times * ten >= rough);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const found = [];
  for (let value = 0; value * unit <= top; value += step) found.push([value * unit, `${value.toFixed(digits)} ${UNITS[power]}`]);
  return found;
}

function drawGrid(pen, box, lines, y) {
  pen.textAlign = "right";
  pen.textBaseline = "middle";
  for (const [bytes, words] of lines) {
    pen.fillStyle = colour("line");
    pen.fillRect(box.x, Math.round(y(bytes)), box.width, 1);
    pen.fillStyle = colour("faint");
    pen.fillText(words, box.x - 8, y(bytes));
  }
}

function drawCeiling(pen, box, height, side = "right") {
  pen.strokeStyle = pen.fillStyle = colour("bad");
  pen.setLineDash([6, 4]);
  pen.beginPath();
  pen.moveTo(box.x, height);
  pen.lineTo(box.x + box.width, height);
  pen.stroke();
  pen.setLineDash([]);
  pen.textAlign = side;
  pen.textBaseline = "bottom";
  const words = "all that the card has for PyTorch", wide = pen.measureText(words).width;
  const left = side === "left" ? box.x + 4 : box.x + box.width - 4 - wide;
  pen.fillText(words, side === "left" ? left : left + wide, height - 2);
  pen.words.push({ left, right: left + wide, top: height - 16, bottom: height - 1 });
}

// The stretch that is looked at, on the strip of the whole.
function drawWindow(pen, box, view, whole) {
  const left = box.x + (box.width * view.from) / whole, right = box.x + (box.width * view.to) / whole;
  pen.fillStyle = colour("paper");
  pen.globalAlpha = 0.72;
  pen.fillRect(box.x, box.y, left - box.x, box.height);
  pen.fillRect(right, box.y, box.x + box.width - right, box.height);
  pen.globalAlpha = 1;
  pen.strokeStyle = pen.fillStyle = colour("accent");
  pen.lineWidth = 1.5;
  pen.strokeRect(left, box.y, Math.max(right - left, 1), box.height);
  for (const edge of [left, right]) pen.fillRect(edge - 2.5, box.y + box.height / 2 - 9, 5, 18);
  return { box, left, right };
}

// A label where the pointer does not hide it.
function besidePointer(tip, canvas, { x, y }) {
  const right = x + 16 + tip.offsetWidth > canvas.clientWidth;
  tip.style.left = `${Math.max(0, right ? x - 16 - tip.offsetWidth : x + 16)}px`;
  tip.style.top = `${Math.max(0, Math.min(y + 14, canvas.clientHeight - tip.offsetHeight))}px`;
}

// The window on a strip, moved or pulled at its edges by the pointer; `stripOf` says where it was drawn last.
function slideWindow(canvas, view, whole, stripOf, show) {
  let held = null;
  const placeOf = (event) => event.clientX - canvas.getBoundingClientRect().left;
  const onStrip = (x) => ((x - stripOf().box.x) / stripOf().box.width) * whole;
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    const x = placeOf(event), { left, right } = stripOf();
    const near = (edge) => Math.abs(x - edge) < 7;
    const part = near(left) ? "from" : near(right) ? "to" : x > left && x < right ? "both" : "new";
    held = { part, at: onStrip(x), from: view.from, to: view.to };
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held) return;
    const now = onStrip(placeOf(event));
    if (held.part === "both") {
      const from = Math.min(Math.max(held.from + now - held.at, 0), whole - (held.to - held.from));
      show(from, from + held.to - held.from);
    } else {
      const fixed = { from: held.to, to: held.from, new: held.at }[held.part];
      show(Math.max(Math.min(fixed, now), 0), Math.min(Math.max(fixed, now), whole));
    }
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, () => (held = null));
}
