"use strict";
// Rows that stay with the server: it answers with at most a few thousand marks, and is asked again for what is zoomed.

class Served {
  constructor(content) {
    this.columns = content.columns;
    this.address = content.address;
    this.zooms = true;
  }

  async query(state) {
    const {x, y, metric, filters, brushes, window, sort, length} = state;
    const question = JSON.stringify({x, y, metric, filters: this.coded(filters), brushes: this.coded(brushes), window, sort, length});
    const reply = await fetch(`${this.address}?q=${encodeURIComponent(question)}`);
    if (!reply.ok) throw new Error(`the server answers ${reply.status}`);
    const answer = await reply.json();
    const column = this.columns[metric];
    return {
      total: answer.total, matching: answer.matching, grid: answer.grid,
      rows: decode(this.columns, answer.rows), context: decode(this.columns, answer.context),
      best: decode(this.columns, answer.best),
      bins: binRows(column, answer.edges, answer.all, answer.bins),
    };
  }

  // Texts as the codes that the table holds.
  coded(filters) {
    return Object.fromEntries(Object.entries(filters).map(([id, filter]) => [
      id, filter.values ? {values: filter.values.map((text) => this.columns[id].categories.indexOf(text))} : filter]));
  }
}

beginViews((content) => new Served(content));
