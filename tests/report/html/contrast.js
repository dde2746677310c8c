// The least readable words of a page: [contrast of their colour with what is behind them, which words].
(() => {
  const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
  const parts = (colour) => {
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3).map((part) => part / 255);
  };
  const linear = (part) => (part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
  const luminance = (colour) => {
    const [red, green, blue] = parts(colour).map(linear);
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = getComputedStyle(at).backgroundColor;
      if (found !== "transparent" && !found.endsWith(", 0)")) return found;
    }
    return "white";
  };
  const contrast = (node) => {
    const [light, dark] = [getComputedStyle(node).color, behind(node)].map(luminance).sort((a, b) => b - a);
    return (light + 0.05) / (dark + 0.05);
  };
  const kinds = "h1, h2, p, dt, dd, td, th, summary, button:not(:disabled):not(.around), .verdict, #legend li, #legend b, .legend li, .legend b, .legend span.faint";
  return [...document.querySelectorAll(kinds)]
    .filter((node) => node.textContent.trim() && node.getClientRects().length)
    .map((node) => [contrast(node), `${node.tagName} ${node.className} ${node.textContent.slice(0, 30)}`])
    .sort((a, b) => a[0] - b[0])[0];
})();
