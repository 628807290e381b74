"use strict";
// Charts of a source: any two metrics, parallel coordinates, a histogram, a table. Starts when the page is read.

const EMBED = {actions: false, ast: true, renderer: "canvas", logLevel: 1}; // ast: expressions are interpreted, so no eval is needed

class Views {
  constructor(content, source) {
    this.content = content;
    this.source = source;
    this.columns = content.columns;
    this.list = Object.values(this.columns);
    this.charts = {};
    const start = content.start;
    this.state = {...start, filters: {}, brushes: {}, window: null, sort: {...start.sort}, length: 25};
    if (start.scenario && start.scenario.value) this.state.filters[start.scenario.id] = {values: [start.scenario.value]};
  }

  async begin() {
    const numbers = this.list.filter((column) => !column.categories).map((column) => [column.id, column.title]);
    const colours = Object.keys(this.content.colours).map((id) => [id, this.columns[id].title]);
    for (const name of ["x", "y"]) {
      choice(`choose-${name}`, numbers, this.state[name], (id) => { this.state[name] = id; this.drawScatter(); });
    }
    choice("choose-colour", colours, this.state.colour, (id) => { this.state.colour = id; this.draw(); });
    choice("choose-metric", numbers, this.state.metric, (id) => { this.state.metric = id; this.drawHistogram(); });
    this.quick("choose-scenario", this.content.start.scenario && this.columns[this.content.start.scenario.id]);
    this.quick("choose-option", this.columns[this.content.start.option]);
    this.refilter();
    document.getElementById("reset").addEventListener("click", () => this.reset());
    window.addEventListener("resize", later(() => this.fitParallel(), 150));
    await this.draw();
    document.documentElement.dataset.drawn = String(this.marks());
  }

  // A select for one column: any value of it, or all.
  quick(id, column) {
    if (!column) return;
    const values = column.categories.map((text, place) => [text, (column.labels || column.categories)[place]]);
    const filter = this.state.filters[column.id];
    choice(id, [["", "all"], ...values], filter ? filter.values[0] : "", (value) => {
      if (value) this.state.filters[column.id] = {values: [value]};
      else delete this.state.filters[column.id];
      this.draw();
    });
  }

  refilter() {
    const quick = [this.content.start.option, (this.content.start.scenario || {}).id];
    const shown = this.list.filter((column) => !quick.includes(column.id) && (!column.categories || column.labels));
    filters(document.getElementById("filters"), shown, this.state, () => this.update());
  }

  reset() {
    for (const id of Object.keys(this.state.filters)) delete this.state.filters[id];
    for (const id of ["choose-scenario", "choose-option"]) if (document.getElementById(id)) document.getElementById(id).value = "";
    this.refilter();
    this.draw();
  }

  // Draw everything anew: the domains of the axes are those of the rows that match.
  async draw() {
    this.state.brushes = {};
    this.state.window = null;
    this.answer = await this.source.query(this.state);
    await Promise.all([this.embedScatter(), this.embedParallel(), this.embedHistogram()]);
    this.say();
  }

  async drawScatter() {
    this.state.window = null;
    this.answer = await this.source.query(this.state);
    await this.embedScatter();
    this.say();
  }

  async drawHistogram() {
    this.answer = await this.source.query(this.state);
    await this.embedHistogram();
  }

  // New rows into the charts that are there.
  async update() {
    const asked = (this.asked = (this.asked || 0) + 1);
    const answer = await this.source.query(this.state);
    if (asked !== this.asked) return; // a later question is on its way
    this.answer = answer;
    await Promise.all([
      put(this.charts.scatter, {points: answer.rows, grid: answer.grid}),
      put(this.charts.parallel, {lines: this.lines()}), put(this.charts.histogram, {bins: answer.bins}),
    ]);
    this.say();
  }

  lines() {
    const most = 1500;
    return answerRows(this.answer, most);
  }

  async embedScatter() {
    const spec = structuredClone(this.content.scatter);
    const [grid, points] = spec.layer;
    for (const name of ["x", "y"]) {
      const axis = structuredClone(this.content.axes[this.state[name]]);
      points.encoding[name] = axis;
      Object.assign(grid.encoding[name], {scale: axis.scale, axis: axis.axis, title: axis.title});
    }
    for (const name of ["color", "shape"]) delete points.encoding[name];
    Object.assign(points.encoding, this.content.colours[this.state.colour] || {});
    for (const {legend} of [points.encoding.color, points.encoding.shape].filter(Boolean)) {
      if (legend) legend.columns = document.getElementById("scatter").clientWidth < 600 ? 1 : 3;
    }
    if (this.answer.rows.length < 200) { // room enough to see each
      points.encoding.opacity.value = 0.8;
      points.encoding.size.value = 70;
    }
    spec.datasets = {points: copies(this.answer.rows), grid: copies(this.answer.grid)};
    if (!this.answer.grid.length) spec.layer.shift(); // all rows are drawn
    if (this.content.diagonal) spec.layer.push(diagonal(this.answer.rows, this.state));
    this.charts.scatter = await this.embed("scatter", spec);
    this.charts.scatter.addEventListener("click", (event, item) => this.point(item));
    if (this.source.zooms) this.charts.scatter.addSignalListener("zoom", later((name, zoom) => this.zoomed(zoom), 120));
  }

  zoomed(zoom) {
    const range = (id) => (zoom && zoom[id] ? zoom[id].map(Number) : null);
    this.state.window = {x: range(this.state.x), y: range(this.state.y)};
    this.update();
  }

  async embedParallel() {
    const spec = structuredClone(this.content.parallel);
    const colour = this.content.colours[this.state.colour];
    if (colour) {
      const scale = {name: "colour", type: "ordinal", ...colour.color.scale};
      spec.scales = [...spec.scales.filter((each) => each.name !== "colour"), scale];
      spec.marks[0].encode.enter.stroke = {scale: "colour", field: this.state.colour};
    }
    spec.width = this.width();
    const lines = this.lines();
    for (const scale of spec.scales) fit(scale, this.columns[scale.name.slice(2)], lines);
    spec.data = [{name: "lines", values: copies(lines)}];
    this.charts.parallel = await this.embed("parallel", spec);
    for (const id of this.content.parallelIds) {
      this.charts.parallel.addSignalListener(`brush_${id}`, later((name, range) => this.brushed(id, range), 60));
    }
  }

  width() {
    return Math.max(document.getElementById("parallel").clientWidth, 110 * this.content.parallelIds.length);
  }

  async fitParallel() {
    if (this.charts.parallel) await this.charts.parallel.width(this.width()).resize().runAsync();
  }

  // A range of an axis in pixels becomes a filter of its column.
  brushed(id, range) {
    const scale = this.charts.parallel.scale(`y_${id}`);
    const column = this.columns[id];
    if (!range || range[0] === range[1]) delete this.state.brushes[id];
    else if (column.categories) {
      this.state.brushes[id] = {values: column.categories.filter((text) => scale(text) >= range[0] && scale(text) <= range[1])};
    } else {
      const [high, low] = range.map((height) => scale.invert(height));
      const slack = 1e-9 * Math.abs(high - low);
      this.state.brushes[id] = {low: low - slack, high: high + slack};
    }
    this.update();
  }

  async embedHistogram() {
    const spec = structuredClone(this.content.histogram);
    const axis = structuredClone(this.content.axes[this.state.metric]);
    for (const layer of spec.layer) Object.assign(layer.encoding.x, axis, {field: "low", bin: "binned"});
    spec.datasets = {bins: copies(this.answer.bins)};
    this.charts.histogram = await this.embed("histogram", spec);
  }

  async embed(name, spec) {
    if (this.charts[name]) this.charts[name].finalize();
    return (await vegaEmbed(`#${name}`, spec, EMBED)).view;
  }

  // How many marks the charts show.
  marks() {
    return Object.values(this.charts).reduce((sum, view) => sum + leaves(view.scenegraph().root), 0);
  }

  say() {
    const {matching, total, rows} = this.answer;
    const front = rows.filter((row) => row.front).length;
    const sample = rows.length < matching ? `, ${rows.length.toLocaleString("en")} of them drawn` : "";
    document.getElementById("count").textContent =
      `${matching.toLocaleString("en")} of ${total.toLocaleString("en")} points${sample}; ${front.toLocaleString("en")} on a front`;
    const shown = this.content.tableIds.map((id) => this.columns[id]);
    table(document.getElementById("points"), shown, this.answer, this.state, () => this.update());
  }

  // The point that was pressed, and how to see all of it.
  point(item) {
    const row = item && item.datum;
    if (!row || !row.key) return;
    const study = this.content.study ? `python -m dse results timeline study=${this.content.study} key=${row.key}` : "";
    const place = document.getElementById("point");
    place.replaceChildren(`Point ${row.key}. `, ...(study ? ["Its timeline: ", element("code", {}, study)] : []));
  }
}

function answerRows(answer, most) {
  const inside = answer.rows.slice(0, most);
  const keys = new Set(inside.map((row) => row.key));
  return [...inside, ...answer.context.filter((row) => !keys.has(row.key)).slice(0, most - inside.length)];
}

// An axis of numbers spans the rows that are drawn.
function fit(scale, column, rows) {
  if (!column || column.categories) return;
  const values = rows.map((row) => row[column.id]).filter((value) => value !== null);
  if (!values.length) return;
  const [low, high] = values.reduce(([least, most], value) => [Math.min(least, value), Math.max(most, value)], [Infinity, -Infinity]);
  scale.domain = low < high ? [low, high] : [low - Math.abs(low || 1) / 10, high + Math.abs(high || 1) / 10];
}

async function put(view, data) {
  if (!view) return;
  for (const [name, rows] of Object.entries(data)) {
    if (name === "grid" && !("grid" in view.getState().data)) continue;
    view.data(name, copies(rows));
  }
  await view.runAsync();
}

// Vega marks the rows that it takes, so every chart has its own.
function copies(rows) {
  return rows.map((row) => ({...row}));
}

function leaves(item) {
  return (item.items || []).reduce((sum, inner) => sum + (inner.items ? leaves(inner) : 1), 0);
}

// The line on which both runs are equal.
function diagonal(rows, {x, y}) {
  const values = rows.flatMap((row) => [row[x], row[y]]).filter((value) => value !== null);
  const ends = values.length ? [Math.min(...values), Math.max(...values)] : [];
  return {
    data: {values: ends.map((value) => ({[x]: value, [y]: value}))}, mark: {type: "line", stroke: "#555", strokeDash: [4, 4], clip: true},
    encoding: {x: {field: x, type: "quantitative"}, y: {field: y, type: "quantitative"}},
  };
}

function later(call, wait) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), wait);
  };
}

async function beginViews(makeSource) {
  const place = document.getElementById("content");
  if (!place) return;
  const content = JSON.parse(place.textContent);
  content.columns = Object.fromEntries(content.columns.map((column) => [column.id, column]));
  try {
    await new Views(content, makeSource(content)).begin();
  } catch (error) {
    document.getElementById("count").textContent = `The charts cannot be drawn: ${error.message}`;
    throw error;
  }
}
