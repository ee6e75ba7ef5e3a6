// Starts the pictures that the page has data for. The text and the tables are there without scripts.

// The whole page

function startTheme() {
  const root = document.documentElement, button = find("theme"), isDark = matchMedia("(prefers-color-scheme: dark)");
  const now = () => root.dataset.theme ?? (isDark.matches ? "dark" : "light");
  const show = () => { button.textContent = now() === "dark" ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = now() === "dark" ? "light" : "dark";
    show();
  });
  isDark.addEventListener("change", show);
  button.hidden = false;
  show();
}

function reveal(id, isNeeded, start) {
  if (!isNeeded) return;
  find(id).hidden = false; // first, so that the pictures know their width
  start();
}

startTheme();
reveal("picture", recorded.length, startPicture);
reveal("lengths", data.lengths?.length, startLengths);
reveal("stragglers-map", data.stragglers?.length, startStragglers);
const metrics = Object.entries(data.metrics ?? {}).filter(([, values]) => values.length);
reveal("metrics", metrics.length, () => metrics.forEach(([name, values]) => startMetric(name, values)));
for (const item of document.querySelectorAll("#events li")) { // events lead to their steps
  const step = Number(item.dataset.step);
  if (!recorded.includes(step)) continue;
  const place = item.querySelector(".step"), button = document.createElement("button");
  button.textContent = place.textContent;
  button.addEventListener("click", () => { chooseStep(step); find("picture-svg").focus(); });
  place.replaceChildren(button);
}
const drawNow = () => drawings.forEach((one) => one());
drawNow();
new ResizeObserver(() => draw(drawings)).observe(document.querySelector("main"));
addEventListener("beforeprint", () => { isPrinting = true; drawNow(); });
addEventListener("afterprint", () => { isPrinting = false; drawNow(); });
addEventListener("scroll", tooltip.hide, {passive: true});
document.documentElement.dataset.ready = "true"; // for tests
