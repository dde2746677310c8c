
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
  pen.fillText("all that the card has for PyTorch", side === "left" ? box.x + 4 : box.x + box.width - 4, height - 2);
}
