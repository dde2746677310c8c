
// One rank's full report, unpacked into a frame when it is asked for. The address keeps which one is open.
(() => {
  const id = (name) => document.getElementById(name);
  const tabs = [...document.querySelectorAll("#tabs button")];
  const known = new Set(tabs.map((tab) => tab.dataset.report));
  let scrolled = 0, opening = 0;

  async function show() {
    const asked = location.hash.replace("#report-", ""), rank = known.has(asked) ? asked : "";
    const turn = (opening += 1);
    for (const tab of tabs) tab.setAttribute("aria-pressed", tab.dataset.report === rank);
    tabs.find((tab) => tab.dataset.report === rank)?.scrollIntoView({ block: "nearest", inline: "nearest" });
    if (rank && !id("overview").hidden) scrolled = scrollY;
    id("overview").hidden = rank !== "";
    id("report").hidden = rank === "";
    if (!rank) return scrollTo(0, scrolled);
    id("frame").dataset.rank = "";
    try {
      const page = await unpack(`report-${rank}`);
      if (turn !== opening) return;
      id("frame").onload = () => (id("frame").dataset.rank = rank);
      id("frame").srcdoc = page;
    } catch (error) {
      id("report-words").hidden = false;
      id("report-words").textContent = `This browser cannot unpack the report (${error.message}). Write that rank's own page: tonnage show FILE --rank ${rank} --html PAGE`;
    }
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-report]");
    if (!button) return;
    location.hash = button.dataset.report ? `report-${button.dataset.report}` : "";
  });
  addEventListener("hashchange", show);
  show();
})();
