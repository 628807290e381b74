"use strict";
// The rows of a page that holds them all. A source answers `query(state)`; `Served` in served.js asks a server instead.

class Inline {
  constructor(content) {
    this.columns = content.columns;
    this.rows = decode(content.columns, content.rows);
    this.zooms = false;
  }

  async query(state) {
    const matching = this.rows.filter((row) => fits(row, state.filters) && fits(row, state.brushes));
    const context = this.rows.filter((row) => fits(row, state.filters));
    const best = [...matching].sort(order(state.sort)).slice(0, state.length);
    return {
      total: this.rows.length, matching: matching.length, rows: matching, context, grid: [],
      bins: bins(this.columns[state.metric], this.rows, matching), best,
    };
  }
}

// Rows of columns of values: texts spelled out, numbers with a text beside them.
function decode(columns, taken) {
  const shown = Object.values(columns).filter((column) => column.id in taken.values);
  return taken.front.map((front, place) => {
    const row = {front, key: taken.keys[place]};
    for (const column of shown) {
      const value = taken.values[column.id][place];
      row[column.id] = column.categories ? column.categories[value] : value;
      if (!column.categories) row[`${column.id}_text`] = write(column, value);
    }
    return row;
  });
}

function fits(row, filters) {
  return Object.entries(filters).every(([id, filter]) => {
    const value = row[id];
    if (filter.values) return filter.values.includes(value);
    return value !== null && value >= filter.low && value <= filter.high;
  });
}

function order({id, down}) {
  const sign = down ? -1 : 1;
  return (one, other) => {
    const [a, b] = [one[id], other[id]];
    if (a === b) return 0;
    if (a === null || b === null) return a === null ? 1 : -1;
    return (a < b ? -1 : 1) * sign;
  };
}

function bins(column, all, matching) {
  const edges = binEdges(column);
  const count = (rows) => {
    const counts = new Array(edges.length - 1).fill(0);
    for (const row of rows) {
      const value = row[column.id];
      if (value === null) continue;
      let place = edges.findIndex((edge) => value < edge) - 1;
      if (place < 0) place = edges.length - 2;
      counts[Math.max(place, 0)] += 1;
    }
    return counts;
  };
  return binRows(column, edges, count(all), count(matching));
}

function binEdges(column, count = 40) {
  const [low, high] = column.log ? [Math.log(column.low), Math.log(column.high)] : [column.low, column.high];
  const edges = Array.from({length: count + 1}, (_, place) => low + ((high - low) * place) / count);
  return column.log ? edges.map(Math.exp) : edges;
}

function binRows(column, edges, all, matching) {
  return all.map((count, place) => ({
    low: edges[place], high: edges[place + 1], all: count, matching: matching[place],
    text: `${write(column, edges[place])} to ${write(column, edges[place + 1])}`,
  }));
}

const PREFIXES = {"-15": "f", "-12": "p", "-9": "n", "-6": "µ", "-3": "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"};
const SI = {s: "s", byte: "B", B: "B", flop: "FLOP", J: "J", W: "W", Hz: "Hz"};

// A number as a person reads it: `16.5 ms`, `1.62×`, `64 %`.
function write(column, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value;
  if (column.unit === "fraction") return `${Number((100 * value).toPrecision(3))} %`;
  if (column.unit === "x") return `${value.toFixed(2)}×`;
  const unit = SI[column.unit];
  if (unit === undefined) return `${Number(value.toPrecision(5)).toLocaleString("en")} ${column.unit}`.trim();
  if (value === 0) return `0 ${unit}`;
  const power = Math.max(-15, Math.min(18, 3 * Math.floor(Math.log10(Math.abs(value)) / 3)));
  return `${Number((value / 10 ** power).toPrecision(4))} ${PREFIXES[power]}${unit}`;
}
