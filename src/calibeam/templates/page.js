// Draws the figures, and runs the explorer. All text goes onto the page as text: the policy allows no HTML from strings,
// but for the empty one, with which Vega clears what it draws into.
globalThis.trustedTypes?.createPolicy("default", { createHTML: (text) => (text === "" ? text : null) });

const one = (selector, within = document) => within.querySelector(selector);

/** An element with properties or attributes, and children that are elements or text. */
function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name in element) element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

/** What Python packed: compressed JSON in base64. */
async function unpack(name) {
  const text = document.getElementById(`data-${name}`).textContent.trim();
  const bytes = Uint8Array.fromBase64?.(text) ?? Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const number = (value, digits = 1) => (value == null ? "–" : value.toFixed(digits).replace("-", "−"));
const signed = (value, digits = 1) => (value == null ? "–" : (value >= 0 ? "+" : "") + number(value, digits));

// Figures

function showTip(_handler, event, _item, value) {
  const tip = one("#tip");
  tip.hidden = !value;
  if (!value) return;
  const entries = typeof value === "object" ? Object.entries(value) : [["", value]];
  tip.replaceChildren(
    ...entries.map(([name, shown]) => make("div", {}, make("span", { className: "soft" }, name), make("b", {}, String(shown)))),
  );
  const { width, height } = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  tip.style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - height - 8))}px`;
}

async function drawFigures() {
  const [figures, theme] = await Promise.all([unpack("figures"), unpack("theme")]);
  const options = { config: theme, ast: true, actions: false, renderer: "svg", defaultStyle: false, tooltip: showTip };
  for (const place of document.querySelectorAll("[data-figure]")) {
    await vegaEmbed(place, figures[place.dataset.figure], options);
  }
}

// Explorer

const SORTS = {
  "as in the data": () => 0,
  "rose most": (a, b) => b.change - a.change,
  "fell most": (a, b) => a.change - b.change,
  "best after": (a, b) => b.after.rouge - a.after.rouge,
  "worst after": (a, b) => a.after.rouge - b.after.rouge,
  "least likely after": (a, b) => a.after.log_p - b.after.log_p,
  "longest after": (a, b) => b.after.words - a.after.words,
  "longest source": (a, b) => b.source.length - a.source.length,
  id: (a, b) => (a.id < b.id ? -1 : a.id > b.id ? 1 : 0),
};
const FILTERS = {
  all: () => true,
  changed: (example) => example.before.output !== example.after.output,
  rose: (example) => example.change > 0,
  fell: (example) => example.change < 0,
  "repeats after": (example) => example.after.repeats,
  "repeats before": (example) => example.before.repeats,
};
const RANKS = { likelihood: "log_p", similarity: "similarity", ROUGE: "rouge" };
const SURPRISE = 6; // a token of this negative log-prob has the full colour

/** A list of which only the rows in sight exist, however many there are. */
class List {
  constructor(element, fill, choose) {
    Object.assign(this, { element, fill, choose, items: [], at: -1, canvas: make("div", { className: "canvas" }) });
    element.append(this.canvas);
    element.addEventListener("scroll", () => this.draw(), { passive: true });
    element.addEventListener("keydown", (event) => this.press(event));
    new ResizeObserver(() => this.draw()).observe(element);
  }

  get height() {
    return parseFloat(getComputedStyle(this.element).getPropertyValue("--row"));
  }

  show(items, at) {
    this.items = items;
    this.canvas.style.height = `${items.length * this.height}px`;
    this.move(at, "start");
  }

  draw() {
    const { height, element } = this;
    const first = Math.max(0, Math.floor(element.scrollTop / height) - 4);
    const rows = this.items.slice(first, first + Math.ceil(element.clientHeight / height) + 8).map((item, offset) => {
      const place = first + offset;
      const row = this.fill(item);
      Object.assign(row, { id: `row-${place}`, role: "option", ariaSelected: String(place === this.at) });
      Object.assign(row, { ariaSetSize: String(this.items.length), ariaPosInSet: String(place + 1) });
      row.style.transform = `translateY(${place * height}px)`;
      row.addEventListener("click", () => this.move(place));
      return row;
    });
    this.canvas.replaceChildren(...rows);
  }

  move(place, where = "nearest") {
    this.at = Math.max(this.items.length ? 0 : -1, Math.min(place, this.items.length - 1));
    const { height, element, at } = this;
    const top = Math.max(at, 0) * height;
    if (where === "start") element.scrollTop = Math.max(0, top - height);
    else if (top < element.scrollTop) element.scrollTop = top;
    else if (top + height > element.scrollTop + element.clientHeight) element.scrollTop = top + height - element.clientHeight;
    this.draw();
    element.setAttribute("aria-activedescendant", at < 0 ? "" : `row-${at}`);
    this.choose(this.items[at]);
  }

  press(event) {
    const page = Math.max(1, Math.floor(this.element.clientHeight / this.height) - 1);
    const steps = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity };
    if (!(event.key in steps) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    this.move(this.at + steps[event.key]);
  }
}

class Explorer {
  constructor(index) {
    Object.assign(this, { index, packs: new Map(), detail: one("#detail"), rank: "likelihood" });
    this.list = new List(one("#list"), row, (example) => this.open(example));
    this.controls = Object.fromEntries(["search", "setting", "sort", "filter", "rank"].map((name) => [name, one(`#${name}`)]));
    const { search, setting, sort, filter, rank } = this.controls;
    offer(setting, index.settings.map((each) => each.name), index.settings[index.shown].name);
    offer(sort, Object.keys(SORTS), "as in the data");
    offer(filter, Object.keys(FILTERS), "all");
    offer(rank, Object.keys(RANKS), "likelihood");
    setting.addEventListener("change", () => this.read());
    rank.addEventListener("change", () => this.open(this.example));
    for (const control of [search, sort, filter]) control.addEventListener("input", () => this.choose());
    search.addEventListener("keydown", (event) => {
      if (event.key === "ArrowDown" || event.key === "Enter") this.list.element.focus();
    });
    one("#list").addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.detail.focus();
    });
    one("#list").addEventListener("click", () => narrow() && this.detail.scrollIntoView({ block: "start" }));
    one("#back").addEventListener("click", () => one("#list").focus());
    addEventListener("keydown", (event) => {
      const typing = event.target.matches?.("input, select, textarea");
      if (event.key === "/" && !typing) {
        event.preventDefault();
        search.focus();
      } else if (event.key === "Escape" && this.detail.contains(event.target)) one("#list").focus();
    });
    this.read();
  }

  /** The examples under the chosen way of decoding. */
  read() {
    const { ids, sources, references, settings } = this.index;
    this.setting = Math.max(0, this.controls.setting.selectedIndex);
    const side = (columns, place) => Object.fromEntries(Object.entries(columns).map(([name, values]) => [name, values[place]]));
    this.examples = ids.map((id, place) => {
      const [before, after] = ["before", "after"].map((name) => side(settings[this.setting][name], place));
      const change = after.rouge - before.rouge;
      return { place, id, source: sources[place], references: references[place], before, after, change };
    });
    this.choose();
  }

  choose() {
    const { search, sort, filter } = this.controls;
    const wanted = search.value.trim().toLowerCase();
    const found = this.examples.filter((example) => FILTERS[filter.value](example) && (!wanted || holds(example, wanted)));
    found.sort((a, b) => SORTS[sort.value](a, b) || a.place - b.place);
    one("#count").textContent = `${found.length.toLocaleString("en")} of ${this.examples.length.toLocaleString("en")}`;
    this.list.show(found, Math.max(0, found.findIndex((example) => example.place === this.example?.place)));
  }

  /** The candidates of an example, from the pack that holds it. */
  async candidates({ place }) {
    const pack = `candidates-${this.setting}-${Math.floor(place / this.index.pack)}`;
    if (!this.packs.has(pack)) this.packs.set(pack, unpack(pack));
    return (await this.packs.get(pack))[place % this.index.pack];
  }

  async open(example) {
    this.example = example;
    if (!example) return this.detail.replaceChildren(make("p", { className: "soft" }, "Nothing matches."));
    const [before, after] = await this.candidates(example);
    if (this.example !== example) return; // another was opened meanwhile
    const key = RANKS[this.controls.rank.value];
    this.detail.replaceChildren(
      make("h3", {}, make("bdi", {}, example.id)),
      make("p", { className: "soft" }, `mean ROUGE ${number(example.before.rouge)} → ${number(example.after.rouge)} (`,
        make("span", { className: tone(example.change) }, signed(example.change)), ")"),
      part("Source", make("div", { className: "text source", tabIndex: 0 }, example.source)),
      part(example.references.length > 1 ? "References" : "Reference",
        ...example.references.map((text) => make("div", { className: "text" }, text))),
      make("div", { className: "sides" }, side("Fine-tuned", before, key), side("Calibrated", after, key)),
    );
    one("#pane").scrollTop = 0;
  }
}

const narrow = () => matchMedia("(max-width: 52rem)").matches;
const tone = (change) => (change > 0.05 ? "good" : change < -0.05 ? "bad" : "soft");
const part = (name, ...children) => make("section", {}, make("h4", {}, name), ...children);

function holds(example, wanted) {
  const { id, source, references, before, after } = example;
  example.text ??= [id, source, ...references, before.output, after.output].join("\n").toLowerCase();
  return example.text.includes(wanted);
}

function offer(select, names, chosen) {
  select.replaceChildren(...names.map((name) => make("option", { value: name, selected: name === chosen }, name)));
}

function row(example) {
  return make("div", { className: "row" },
    make("bdi", { className: "id" }, example.id),
    make("span", { className: `change ${tone(example.change)}` }, signed(example.change)),
    make("bdi", { className: "output" }, example.after.output || "(empty)"));
}

/** All candidates of one model, ranked; the best by ROUGE is marked wherever it stands. */
function side(name, packed, key) {
  const candidates = packed.map(([log_p, similarity, rouge, pieces, tokens]) => ({ log_p, similarity, rouge, pieces, tokens }));
  const best = Math.max(...candidates.map((candidate) => candidate.rouge));
  candidates.sort((a, b) => b[key] - a[key]);
  const heads = [["", "rank"], ["log P", "log_p"], ["sim.", "similarity"], ["ROUGE", "rouge"], ["candidate", ""]];
  return make("div", {},
    make("h4", {}, name),
    make("table", { className: "candidates" },
      make("thead", {}, make("tr", {}, ...heads.map(([text, of]) =>
        make("th", { scope: "col", ariaSort: of === key ? "descending" : "none" }, text)))),
      make("tbody", {}, ...candidates.map((candidate, rank) =>
        make("tr", { className: candidate.rouge === best ? "best" : "" },
          make("td", {}, String(rank + 1)),
          make("td", {}, number(candidate.log_p)),
          make("td", {}, number(candidate.similarity, 2)),
          make("td", {}, number(candidate.rouge)),
          make("td", { className: "text" }, ...tokens(candidate)))))));
}

function tokens({ pieces, tokens }) {
  return pieces.map((piece, place) => {
    const shown = place ? piece : piece.trimStart();
    const mark = /^<[^<>]*>$/.test(piece) ? " mark" : ""; // such as the end token
    const token = make("span", { className: `token${mark}`, title: `log P ${number(tokens[place], 2)}` }, shown);
    token.style.setProperty("--surprise", Math.min(1, -tokens[place] / SURPRISE).toFixed(2));
    return token;
  });
}

async function start() {
  if (one("#explorer")) new Explorer(await unpack("index"));
  await drawFigures();
  document.documentElement.dataset.ready = "";
}
start().catch((error) => {
  console.error(error);
  one("#trouble").hidden = false;
});
