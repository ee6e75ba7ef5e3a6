// The picture of a step: a row for each rank, with its spans and its buckets.

// The step that the pictures show

const recorded = Object.keys(data.steps ?? {}).map(Number).sort(byNumber);
const drawings = []; // functions that draw the pictures again
let shown = null; // the step in the picture, as `readStep` returns it
const view = {from: 0, to: 1, page: "", bucket: null, cursor: null};

// Read one step: split each wait into the part for a late rank and the part for the transfer, as the figures do.
function readStep(number) {
  const names = Object.keys(data.steps[number]).map(Number).sort(byNumber);
  const ranks = names.map((rank) => ({rank, ...data.steps[number][rank]}));
  const zero = Math.min(...ranks.map((one) => one.began));
  const length = Math.max(1, ...ranks.map((one) => one.ended - zero));
  const last = new Map(); // by bucket: the rank that sent it last, and when
  for (const one of ranks) {
    const nth = {}; // several modules can have a bucket of the same number
    one.buckets = (one.buckets ?? []).map(([index, ...times]) => {
      nth[index] = (nth[index] ?? 0) + 1;
      const [sent, waitBegan, reduced] = times.map((at) => at - zero);
      const key = `${index}.${nth[index]}`;
      if (!last.has(key) || sent > last.get(key).at) last.set(key, {rank: one.rank, at: sent});
      return {kind: "bucket", key, index, sent, waitBegan, reduced};
    });
  }
  const lateOf = {};
  for (const one of ranks) {
    for (const bucket of one.buckets) {
      bucket.last = last.get(bucket.key);
      const waited = Math.max(0, bucket.reduced - bucket.waitBegan);
      bucket.late = bucket.last.rank === one.rank ? 0 : clamp(bucket.last.at - bucket.waitBegan, 0, waited);
      lateOf[bucket.key] = (lateOf[bucket.key] ?? 0) + bucket.late;
    }
    one.spans = one.spans.flatMap(([kind, began, ended, label]) => {
      const span = {kind, began: began - zero, ended: ended - zero, label};
      if (kind !== "wait") return [span];
      const bucket = one.buckets.find((b) => `bucket ${b.index}` === label && b.reduced >= span.ended - 1)
        ?? one.buckets.find((b) => `bucket ${b.index}` === label);
      const middle = clamp(bucket?.late ? bucket.waitBegan + bucket.late : span.began, span.began, span.ended);
      return [
        {...span, kind: "late", ended: middle, forRank: bucket?.last.rank},
        {...span, kind: "transfer", began: middle},
      ].filter((part) => part.ended > part.began);
    });
    const sent = one.buckets.map((b) => b.sent);
    one.lateness = sent.length ? sent.reduce((a, b) => a + b, 0) / sent.length : one.ended - zero;
  }
  const [worst] = Object.keys(lateOf).sort((a, b) => lateOf[b] - lateOf[a]);
  const order = [...ranks].sort((a, b) => b.lateness - a.lateness).map((one) => one.rank);
  return {number, ranks, length, last, order, worst: lateOf[worst] > length * 0.01 ? worst : null};
}

// Show the step with this number, or the nearest one that is in the page.
function chooseStep(wanted) {
  const number = recorded.reduce((best, one) => (Math.abs(one - wanted) < Math.abs(best - wanted) ? one : best));
  shown = readStep(number);
  Object.assign(view, {from: 0, to: shown.length, bucket: shown.worst, cursor: null});
  find("step-number").value = number;
  const missing = number === wanted ? "" : `Step ${wanted} is not in this page. `;
  const mean = shown.ranks.reduce((sum, one) => sum + one.ended - one.began, 0) / shown.ranks.length;
  const apart = shown.length > 1.02 * mean ? `; ranks do not begin together, so the picture spans ${time(shown.length)}` : "";
  find("step-words").textContent = `${missing}Step ${number}: ${time(mean)}, the mean of its ranks${apart}`;
  for (const button of find("step-choices").children) {
    button.setAttribute("aria-pressed", String(Number(button.dataset.step) === number));
  }
  find("step-previous").disabled = number === recorded[0];
  find("step-next").disabled = number === recorded.at(-1);
  tooltip.hide();
  draw(drawings);
}

const neighbour = (by) => chooseStep(recorded[clamp(recorded.indexOf(shown.number) + by, 0, recorded.length - 1)]);

const asked = new Set();
function draw(some = [drawPicture]) { // at most once a frame, however fast the wheel turns
  if (!asked.size) requestAnimationFrame(() => { asked.forEach((one) => one()); asked.clear(); });
  for (const one of some) asked.add(one);
}

// The picture of a step

// The pages of ranks: first the latest, the earliest and some evenly in between, then all in order.
function rankPages() {
  const names = shown.ranks.map((one) => one.rank);
  if (names.length <= MAX_ROWS) return {"all ranks": names};
  const chosen = new Set([...shown.order.slice(0, 4), ...shown.order.slice(-4)]);
  for (let i = 0; chosen.size < MAX_ROWS && i < names.length; i++) {
    chosen.add(names[Math.floor((i * names.length) / 8) % names.length]);
    if (i >= 8) chosen.add(names[i]);
  }
  const title = `${MAX_ROWS} of ${names.length}: latest, earliest and some between`;
  const pages = {[title]: names.filter((one) => chosen.has(one))};
  for (let at = 0; at < names.length; at += MAX_ROWS) {
    const some = names.slice(at, at + MAX_ROWS);
    pages[`${some[0]} to ${some.at(-1)}`] = some;
  }
  return pages;
}

let rows = []; // the ranks in the picture, with the places of their spans and buckets
let edge = {left: 0, right: 1};

function drawPicture() {
  const svg = find("picture-svg");
  const pages = rankPages();
  if (!(view.page in pages)) view.page = Object.keys(pages)[0];
  find("rank-pages").hidden = Object.keys(pages).length < 2;
  find("rank-page").replaceChildren(...Object.keys(pages).map((name) => new Option(name)));
  find("rank-page").value = view.page;
  rows = shown.ranks.filter((one) => pages[view.page].includes(one.rank));
  const hasBuckets = find("show-buckets").checked && rows.some((one) => one.buckets.length);
  const lanes = hasBuckets ? Math.max(...rows.map((one) => one.buckets.length)) : 0;
  const pitch = lanes ? clamp(64 / lanes, 2, 6) : 0;
  const spanHeight = 26, top = 48, rowHeight = spanHeight + lanes * pitch + (lanes ? 18 : 10);
  const height = top + rows.length * rowHeight + 4;
  const width = canvas(svg, height, `The picture of step ${shown.number}, ${time(shown.length)}`);
  edge = {left: width < 500 ? 52 : 76, right: width - 10};
  const x = (at) => edge.left + ((at - view.from) / (view.to - view.from)) * (edge.right - edge.left);
  const inside = (at) => clamp(x(at), edge.left, edge.right);
  const isSeen = (began, ended) => ended >= view.from && began <= view.to;
  Object.assign(svg.dataset, {step: shown.number, from: Math.round(view.from), to: Math.round(view.to)});
  for (const at of ticks(view.from, view.to, (edge.right - edge.left) / 90)) {
    line(svg, "grid", x(at), 22, x(at), height);
    write(svg, "small", x(at), 15, `${Number((at / 1000).toFixed(3))} ms`, x(at) > width - 40 ? "end" : "middle");
  }
  rows.forEach((one, index) => {
    one.y = top + index * rowHeight;
    one.items = [];
    const row = add(svg, "g", {class: "row", "data-rank": one.rank});
    write(row, "strong", 6, one.y + 13, `rank ${one.rank}`);
    const place = shown.order.length < 2 ? "" : one.rank === shown.order[0] ? "latest"
      : one.rank === shown.order.at(-1) ? "earliest" : "";
    write(row, "small", 6, one.y + 27, place);
    for (const span of one.spans) {
      one.items.push({...span, y: one.y, height: spanHeight});
      if (isSeen(span.began, span.ended)) drawSpan(row, one, span, inside, spanHeight);
    }
    one.buckets.forEach((bucket, lane) => {
      if (!hasBuckets) return;
      const y = one.y + spanHeight + 4 + lane * pitch;
      one.items.push({...bucket, began: bucket.sent, ended: bucket.reduced, y, height: pitch});
      if (isSeen(bucket.sent, bucket.reduced)) drawBucket(row, one, bucket, inside, y, pitch);
    });
  });
  drawLastSent(svg, x, top, height);
  const item = rows.find((one) => one.rank === view.cursor?.rank)?.items[view.cursor.index];
  if (item) {
    const width = Math.max(3, inside(item.ended) - inside(item.began));
    rect(svg, "cursor", inside(item.began), item.y, width, item.height);
  }
}

function drawSpan(row, one, span, inside, height) {
  const [left, right] = [inside(span.began), inside(span.ended)];
  const group = add(row, "g", {class: `fill-${span.kind}`});
  add(group, "rect", {class: "span", x: left, y: one.y, width: Math.max(0.7, right - left), height,
    "data-item": `${one.rank}:${one.items.length - 1}`, "data-rank": one.rank, "data-kind": span.kind,
    "data-began": span.began, "data-us": span.ended - span.began});
  const texts = [span.kind === "late" ? `waits for rank ${span.forRank}` : WORDS[span.kind], `rank ${span.forRank}`];
  const words = texts.slice(0, span.kind === "late" ? 2 : 1).find((one) => textWidth(one) + 8 < right - left);
  if (words) write(group, "inside", (left + right) / 2, one.y + 17, words, "middle");
}

// A thin line from sent to reduced. The thick part is the wait. A dot marks the rank that sent the bucket last.
function drawBucket(row, one, bucket, inside, y, pitch) {
  const isLast = bucket.last.rank === one.rank && shown.ranks.length > 1;
  const active = bucket.key === view.bucket ? " active" : "";
  const middle = y + pitch / 2;
  const group = add(row, "g", {class: `bucket${active}`, "data-item": `${one.rank}:${one.items.length - 1}`,
    "data-rank": one.rank, "data-bucket": bucket.index, "data-waits-for": isLast ? "" : bucket.last.rank});
  const [left, right] = [inside(bucket.sent), inside(bucket.reduced)];
  rect(group, "hit", left, y, Math.max(4, right - left), pitch);
  line(group, "", left, middle, right, middle);
  const until = bucket.waitBegan + bucket.late, thick = Math.min(pitch, 5);
  for (const [kind, from, to] of [["late", bucket.waitBegan, until], ["transfer", until, bucket.reduced]]) {
    if (to > from && to >= view.from && from <= view.to) {
      const width = Math.max(0.7, inside(to) - inside(from));
      rect(group, `waiting fill-${kind}`, inside(from), middle - thick / 2, width, thick);
    }
  }
  if (isLast && bucket.sent >= view.from && bucket.sent <= view.to) {
    add(group, "circle", {cx: left, cy: middle, r: clamp(pitch / 2, 1.3, 3)});
  }
}

// A vertical line at the time when all ranks had sent the active bucket, with the rank that was last.
function drawLastSent(svg, x, top, height) {
  const last = shown.last.get(view.bucket);
  if (!last || shown.ranks.length < 2 || last.at < view.from || last.at > view.to) return;
  const at = x(last.at), words = `rank ${last.rank} sends bucket ${view.bucket.split(".")[0]} last`;
  const isLeft = at + textWidth(words) + 14 > edge.right;
  line(svg, "last-sent", at, top - 16, at, height - 2);
  write(svg, "", at + (isLeft ? -5 : 5), top - 9, words, isLeft ? "end" : "start");
}

// What the tooltip says about a span or a bucket
function describe(rank, item) {
  if (item.kind !== "bucket") {
    const words = item.kind === "late" ? `waits for rank ${item.forRank}` : WORDS[item.kind] ?? item.kind;
    return [`rank ${rank}: ${words}`, `${time(item.ended - item.began)}, from ${time(item.began)} on`, item.label];
  }
  const about = (data.buckets ?? []).find((one) => one.bucket === item.index);
  const names = about?.parameters ?? [], more = names.length - 6;
  const andMore = more > 0 ? ` and ${more.toLocaleString("en")} more` : "";
  const waited = Math.max(0, item.reduced - item.waitBegan);
  return [
    `rank ${rank}: bucket ${item.index}${about ? `, ${bytes(about.bytes)}` : ""}`,
    `sent at ${time(item.sent)}, reduced at ${time(item.reduced)}`,
    item.late ? `waits ${time(waited)}, of these ${time(item.late)} because rank ${item.last.rank} sends it last`
      : waited ? `waits ${time(waited)} for the transfer` : "the rank does not wait for it",
    names.slice(0, 6).join(", ") + andMore,
  ];
}

function zoom(factor, at = (view.from + view.to) / 2) {
  const range = clamp((view.to - view.from) * factor, 10, shown.length);
  const share = (at - view.from) / (view.to - view.from);
  look(at - share * range, range);
}
function look(from, range) {
  view.from = clamp(from, 0, shown.length - range);
  view.to = view.from + range;
  draw();
}
const pan = (share) => look(view.from + share * (view.to - view.from), view.to - view.from);

// Move the cursor to another rank, or to the next or previous span or bucket of its rank.
function moveCursor(byRank, byItem) {
  const row = view.cursor ? rows.findIndex((one) => one.rank === view.cursor.rank) : -1;
  const next = rows[clamp(row + byRank, 0, rows.length - 1)];
  const index = view.cursor ? clamp(view.cursor.index + byItem, 0, next.items.length - 1) : 0;
  const item = next.items[index];
  if (!item) return;
  view.cursor = {rank: next.rank, index};
  if (item.kind === "bucket") view.bucket = item.key;
  if (item.ended < view.from || item.began > view.to) look(item.began, view.to - view.from);
  draw();
  const share = clamp(((item.began + item.ended) / 2 - view.from) / (view.to - view.from), 0, 1);
  const place = [edge.left + share * (edge.right - edge.left), item.y + item.height];
  tooltip.show(...frameOf(find("picture-svg")).outside(...place), describe(next.rank, item), true);
}

function startPicture() {
  const svg = find("picture-svg");
  const timeAt = (x) => view.from + ((x - edge.left) / (edge.right - edge.left)) * (view.to - view.from);
  const keys = {
    "+": () => zoom(0.7), "=": () => zoom(0.7), "-": () => zoom(1 / 0.7), "0": () => look(0, shown.length),
    ArrowLeft: () => pan(-0.2), ArrowRight: () => pan(0.2),
    ArrowUp: () => moveCursor(-1, 0), ArrowDown: () => moveCursor(1, 0),
    ",": () => moveCursor(0, -1), ".": () => moveCursor(0, 1), "[": () => neighbour(-1), "]": () => neighbour(1),
    Escape: () => { view.cursor = null; tooltip.hide(); svg.blur(); draw(); },
  };
  svg.addEventListener("keydown", (event) => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    keys[event.key]();
  });
  svg.addEventListener("wheel", (event) => {
    // A page that scrolls past the picture must not zoom it, so the wheel zooms only a picture in use.
    const isSideways = Math.abs(event.deltaX) > Math.abs(event.deltaY);
    const isWhole = view.to - view.from >= shown.length;
    const isInUse = event.ctrlKey || (document.activeElement === svg && !(isWhole && event.deltaY > 0));
    if (isSideways ? isWhole : !isInUse) return;
    event.preventDefault();
    if (isSideways) pan(event.deltaX / 800);
    else zoom(Math.exp(clamp(event.deltaY, -80, 80) / 300), timeAt(frameOf(svg).inside(event).x));
  }, {passive: false});
  const fingers = new Map();
  let before = null; // the middle of the fingers, and the distance of two
  svg.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, frameOf(svg).inside(event));
    before = null;
  });
  svg.addEventListener("pointermove", (event) => {
    if (fingers.has(event.pointerId)) {
      fingers.set(event.pointerId, frameOf(svg).inside(event));
      const [first, second] = [...fingers.values()];
      const middle = second ? (first.x + second.x) / 2 : first.x;
      const distance = second ? Math.max(20, Math.hypot(first.x - second.x, first.y - second.y)) : 0;
      const start = before?.start ?? middle;
      if (before && (distance || before.isMoving || Math.abs(middle - start) > 3)) {
        svg.setPointerCapture(event.pointerId); // only now, so that a click stays a click
        pan((before.middle - middle) / (edge.right - edge.left));
        if (distance && before.distance) zoom(before.distance / distance, timeAt(middle));
        before.isMoving = true;
      }
      before = {middle, distance, start, isMoving: before?.isMoving};
      if (before.isMoving) return tooltip.hide();
    }
    const [row, index] = (event.target.closest("[data-item]")?.dataset.item ?? "").split(":");
    const item = rows.find((one) => one.rank === Number(row) && index)?.items[index];
    if (!item) return tooltip.hide();
    if (item.kind === "bucket" && view.bucket !== item.key) { view.bucket = item.key; draw(); }
    tooltip.show(event.clientX, event.clientY, describe(row, item));
  });
  for (const end of ["pointerup", "pointercancel", "pointerleave"]) {
    svg.addEventListener(end, (event) => {
      fingers.delete(event.pointerId);
      before = null;
      if (end === "pointerleave") tooltip.hide();
    });
  }
  svg.addEventListener("blur", tooltip.hide);
  for (const [name, number] of Object.entries(data.choices ?? {})) {
    const button = add(find("step-choices"), "button", {type: "button", "data-choice": name, "data-step": number},
      `${name[0].toUpperCase()}${name.slice(1)} (${number})`);
    button.addEventListener("click", () => chooseStep(number));
  }
  find("step-previous").addEventListener("click", () => neighbour(-1));
  find("step-next").addEventListener("click", () => neighbour(1));
  find("step-number").addEventListener("change", (event) => {
    if (event.target.value !== "") chooseStep(Number(event.target.value));
  });
  find("zoom-in").addEventListener("click", () => zoom(0.6));
  find("zoom-out").addEventListener("click", () => zoom(1 / 0.6));
  find("zoom-all").addEventListener("click", () => look(0, shown.length));
  find("show-buckets").addEventListener("change", () => draw());
  find("rank-page").addEventListener("change", (event) => {
    Object.assign(view, {page: event.target.value, cursor: null});
    draw();
  });
  const all = Object.values(data.steps).flatMap((ranks) => Object.values(ranks));
  const kinds = new Set(all.flatMap((one) => one.spans.map((span) => span[0])));
  if (kinds.has("wait")) kinds.add("transfer");
  if (kinds.has("wait") && Object.keys(data.steps[recorded[0]]).length > 1) kinds.add("late");
  const lines = [["line", "bucket, from sent to reduced"], ["thick", "the wait for it"], ["dot", "sent last"]];
  legend("picture-legend", [
    ...Object.keys(WORDS).filter((kind) => kinds.has(kind)).map((kind) => [`fill-${kind}`, WORDS[kind]]),
    ...(all.some((one) => one.buckets?.length) ? lines : []),
  ]);
  find("skip").hidden = false;
  drawings.push(drawPicture);
  chooseStep(data.choices?.typical ?? recorded[0]);
}
