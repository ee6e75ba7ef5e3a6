// Charts over the steps

// Let a chart be read by pointer and keys. `points` returns what there is to read: x, y, step, and lines of text.
function makeReadable(svg, points) {
  let at = -1;
  const show = (index, isSaid) => {
    at = index;
    const point = points()[at];
    svg.querySelector(".mark")?.remove();
    add(svg, "circle", {class: "mark", cx: point.x, cy: point.y, r: 4});
    tooltip.show(...frameOf(svg).outside(point.x, point.y), point.lines, isSaid);
  };
  const leave = () => { svg.querySelector(".mark")?.remove(); tooltip.hide(); };
  const nearest = (event) => { // in a heat map the row counts, too
    const {x, y} = frameOf(svg).inside(event);
    const far = (one) => Math.abs(one.x - x) + (one.row === undefined ? 0 : 100 * Math.abs(one.y - y));
    return points().reduce((best, one, index, all) => (far(one) < far(all[best]) ? index : best), 0);
  };
  svg.addEventListener("pointermove", (event) => show(nearest(event)));
  svg.addEventListener("pointerleave", leave);
  svg.addEventListener("blur", leave);
  svg.addEventListener("click", (event) => { if (recorded.length) chooseStep(points()[nearest(event)].step); });
  svg.addEventListener("keydown", (event) => {
    const all = points(), here = all[at];
    const row = {ArrowUp: -1, ArrowDown: 1}[event.key];
    const side = {ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9}[event.key];
    if (event.key === "Escape") leave();
    else if (event.key === "Enter" && here && recorded.length) chooseStep(here.step);
    else if (side) show(clamp(at + side, 0, all.length - 1), true);
    else if (row && here?.row !== undefined) {
      const next = all.findIndex((one) => one.row === here.row + row && one.x >= here.x);
      if (next >= 0) show(next, true);
    } else return;
    event.preventDefault();
  });
}

function stepNumbers(svg, first, last, x, y, right) {
  write(svg, "small", 6, y, "step");
  for (const step of ticks(first, last, right / 75).filter(Number.isInteger)) {
    write(svg, "small", x(step), y, step, x(step) > right - 16 ? "end" : "middle");
  }
}

// Draw the lines and numbers of both axes. Return the functions from values to places.
function axes(svg, width, height, [firstStep, lastStep], [low, high], words) {
  const left = 64, right = width - 12, top = 10, bottom = height - 24;
  const x = (step) => left + ((step - firstStep) / Math.max(1, lastStep - firstStep)) * (right - left);
  const y = (value) => bottom - ((clamp(value, low, high) - low) / (high - low || 1)) * (bottom - top);
  for (const value of ticks(low, high, height / 40)) {
    line(svg, "grid", left, y(value), right, y(value));
    write(svg, "small", left - 6, y(value) + 4, words(value), "end");
  }
  stepNumbers(svg, firstStep, lastStep, x, height - 7, right);
  return {x, y, left, right, top, bottom};
}

function startLengths() {
  const svg = find("lengths-svg"), lengths = data.lengths, height = 210;
  const sorted = lengths.map((one) => one[1]).sort(byNumber), [first, end] = [lengths[0][0], lengths.at(-1)[0] + 1];
  const most = sorted.at(-1), usual = sorted[Math.floor(sorted.length * 0.98)];
  const limit = most > 3 * usual ? usual * 1.5 : most; // one very slow step must not flatten all others
  const events = (data.events ?? []).filter((one) => one.step >= first && one.step < end);
  let points = [];
  drawings.push(() => {
    const {x, y, top, bottom} = axes(svg, canvas(svg, height), height, [first, end], [0, limit], inMs);
    const area = (low, high) => lengths.map((one, i) => (
      `M${x(one[0])} ${y(low(one))}V${y(high(one))}H${x(lengths[i + 1]?.[0] ?? end)}V${y(low(one))}Z`
    )).join("");
    const waits = (one) => one[2] + one[3];
    add(svg, "path", {class: "fill-rest", d: area(waits, (one) => one[1])});
    add(svg, "path", {class: "fill-late", d: area(() => 0, (one) => one[2])});
    add(svg, "path", {class: "fill-transfer", d: area((one) => one[2], waits)});
    for (const {step} of events) line(svg, "event", x(step + 0.5), top, x(step + 0.5), bottom);
    points = lengths.map(([step, length, late, transfer]) => ({step, x: x(step + 0.5), y: y(length), lines: [
      `step ${step}: ${time(length)}`, `waits for late ranks: ${time(late)}`, `transfer: ${time(transfer)}`,
      ...events.filter((one) => one.step === step).map((one) => one.words)]}));
    for (const [step, length] of lengths.filter((one) => one[1] > limit)) {
      write(svg, "small", x(step), 9, `▲ ${time(length)}`, x(step) < 160 ? "start" : "end");
    }
    if (!shown) return;
    const at = x(shown.number + 0.5);
    svg.dataset.step = shown.number;
    line(svg, "chosen", at, top, at, bottom);
    add(svg, "path", {d: `M${at - 5} ${bottom + 7}h10l-5 -7z`, style: "fill: var(--ink)"});
  });
  makeReadable(svg, () => points);
  legend("lengths-legend", ["late", "transfer", "rest"].map((kind) => [`fill-${kind}`, WORDS[kind]]));
}

// The heat map: ranks from top to bottom, steps from left to right.
function startStragglers() {
  const svg = find("stragglers-svg"), rowHeight = 26, left = 64;
  const total = {}, steps = [...(data.lengths ?? []), ...data.stragglers].map((one) => one[0]);
  for (const [, rank, late] of data.stragglers) total[rank] = (total[rank] ?? 0) + late;
  const names = Object.keys(total).sort((a, b) => total[b] - total[a]).slice(0, MAX_ROWS).map(Number).sort(byNumber);
  const first = lowest(steps), range = highest(steps) - first + 1;
  const letter = (phase) => phase.slice(0, 1).toUpperCase();
  let cells = [];
  drawings.push(() => {
    const height = names.length * rowHeight + 26;
    const width = canvas(svg, height);
    const columns = Math.min(range, Math.floor((width - left - 12) / 16)), size = (width - left - 12) / columns;
    const found = new Map();
    for (const [step, rank, late, phase] of data.stragglers) {
      const row = names.indexOf(rank), column = Math.floor(((step - first) * columns) / range);
      if (row < 0) continue;
      const key = row * columns + column;
      if (!found.has(key)) found.set(key, {row, column, rank, sum: 0, num: 0, worst: 0, phases: {}});
      const cell = found.get(key);
      cell.sum += late;
      cell.num += 1;
      cell.phases[phase] = (cell.phases[phase] ?? 0) + late;
      if (late >= cell.worst) Object.assign(cell, {worst: late, step});
    }
    const most = Math.max(1, ...[...found.values()].map((one) => one.sum));
    names.forEach((rank, row) => {
      line(svg, "grid", left, (row + 1) * rowHeight, width - 12, (row + 1) * rowHeight);
      write(svg, "strong", 6, row * rowHeight + 18, `rank ${rank}`);
    });
    cells = [...found].sort(([a], [b]) => a - b).map(([, cell]) => {
      const [phase] = Object.keys(cell.phases).sort((a, b) => cell.phases[b] - cell.phases[a]);
      const x = left + cell.column * size, y = cell.row * rowHeight + 1, bar = Math.max(1.5, (9 * cell.sum) / most);
      const group = add(svg, "g", {class: `fill-${phase}`, "data-rank": cell.rank, "data-phase": phase});
      group.dataset.step = cell.step;
      rect(group, "tint", x + 0.5, y, size - 1, rowHeight - 2);
      rect(group, "", x + 0.5, y + rowHeight - 2 - bar, size - 1, bar);
      write(group, "", x + size / 2, y + 12, letter(phase), "middle");
      return {...cell, x: x + size / 2, y: y + rowHeight / 2, lines: [
        `rank ${cell.rank} was late in ${cell.num === 1 ? `step ${cell.step}` : `${cell.num} steps`}`,
        `the others waited ${time(cell.sum)}, mostly because of its ${phase}`,
        ...(cell.num > 1 ? [`worst: step ${cell.step}, ${time(cell.worst)}`] : [])]};
    });
    const middleOf = (step) => left + ((step - first + 0.5) * (width - left - 12)) / range;
    stepNumbers(svg, first, first + range - 1, middleOf, height - 8, width - 12);
  });
  makeReadable(svg, () => cells);
  const phases = [...new Set(data.stragglers.map((one) => one[3]))].sort();
  const more = Object.keys(total).length - names.length;
  legend("stragglers-legend", phases.map((phase) => [`fill-${phase}`, WORDS[phase] ?? phase, letter(phase)]));
  if (more) add(find("stragglers-legend"), "li", {}, `${more} more ranks were late for a shorter time`);
  find("stragglers-map").hidden = false;
}

function startMetric(name, values) {
  const known = values.filter((one) => one[1] !== null), missing = values.find((one) => one[1] === null);
  const box = add(find("metrics-charts"), "div"), title = add(box, "h3", {}, name);
  const words = `${values.length - known.length} of ${values.length} values are not finite`;
  if (missing) add(box, "p", {}, `${words}, first in step ${missing[0]}.`);
  if (!known.length) return;
  const numbers = known.map((one) => one[1]), [from, to] = [numbers[0], numbers.at(-1)].map(short);
  add(title, "span", {}, `last: ${to}`);
  const svg = add(add(box, "div", {class: "frame"}), "svg", {role: "application", tabindex: 0, "data-metric": name,
    "aria-label": `${name}: ${from} in step ${known[0][0]}, ${to} in step ${known.at(-1)[0]}`});
  let points = [];
  drawings.push(() => {
    const steps = [values[0][0], values.at(-1)[0]];
    const {x, y} = axes(svg, canvas(svg, 170), 170, steps, [lowest(numbers), highest(numbers)], short);
    let isBroken = true; // a value that is no number leaves a gap
    const path = values.map(([step, value]) => {
      const move = isBroken ? "M" : "L";
      isBroken = value === null;
      return isBroken ? "" : `${move}${x(step).toFixed(1)} ${y(value).toFixed(1)}`;
    });
    add(svg, "path", {class: "curve", d: path.join("")});
    points = known.map(([step, value]) => (
      {step, x: x(step), y: y(value), lines: [`${name}: ${short(value)}`, `step ${step}`]}));
  });
  makeReadable(svg, () => points);
}
