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
