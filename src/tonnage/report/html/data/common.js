"use strict";
// What the charts share. Words of a recording reach the page by textContent alone.
const data = JSON.parse(document.getElementById("data").textContent);
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

function inWords(bytes) {
  let power = 0;
  while (power < 4 && Math.abs(bytes) >= 1024 ** (power + 1)) power += 1;
  return power ? `${(bytes / 1024 ** power).toFixed(2)} ${UNITS[power]}` : `${bytes} B`;
}

function make(tag, className, words) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (words !== undefined) made.textContent = words;
  return made;
}

function sized(bytes) {
  const made = make("span", "size", inWords(bytes));
  made.dataset.bytes = bytes;
  made.title = `${bytes.toLocaleString("en")} bytes`;
  return made;
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// Levels from their differences.
function sums(differences) {
  const levels = new Float64Array(differences.length);
  differences.reduce((level, difference, at) => (levels[at] = level + difference), 0);
  return levels;
}

// The last of ascending numbers that is at most this; -1 where none is.
function lastUpTo(numbers, most) {
  let low = -1, high = numbers.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (numbers[middle] <= most) low = middle;
    else high = middle - 1;
  }
  return low;
}

// What was packed into the page.
async function unpack(name) {
  const packed = Uint8Array.from(atob(document.getElementById(name).textContent), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"))).text();
}
