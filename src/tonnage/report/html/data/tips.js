"use strict";
// What a mark's title says, beside the pointer or the mark in focus at once, where a browser would wait a second.
(() => {
  const tip = document.getElementById("tip");
  const hide = () => (tip.hidden = true);

  function show(mark, x, y) {
    const [name, ...lines] = mark.words.split("\n");
    const parts = [Object.assign(document.createElement("strong"), { textContent: name })];
    parts.push(...lines.filter(Boolean).map((words) => Object.assign(document.createElement("span"), { textContent: words })));
    tip.replaceChildren(...parts);
    tip.hidden = false;
    const wide = document.documentElement.clientWidth;
    const left = x + 14 + tip.offsetWidth > wide ? x - 14 - tip.offsetWidth : x + 14;
    tip.style.left = `${Math.min(Math.max(left, 4), Math.max(wide - tip.offsetWidth - 4, 4)) + scrollX}px`;
    tip.style.top = `${y + 14 + scrollY}px`;
  }

  for (const mark of document.querySelectorAll(".mark")) {
    const title = mark.querySelector("title");
    mark.words = title.textContent;
    mark.setAttribute("aria-label", mark.words);
    mark.setAttribute("role", "img");
    title.remove();
    mark.addEventListener("pointermove", (event) => show(mark, event.clientX, event.clientY));
    mark.addEventListener("pointerleave", hide);
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(mark, box.right, box.bottom);
    });
    mark.addEventListener("blur", hide);
  }
  addEventListener("keydown", (event) => event.key === "Escape" && hide());
})();
