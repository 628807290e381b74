"use strict";
// Controls beside the charts. All texts are set as text, never as markup.

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function choice(id, options, chosen, changed) {
  const select = document.getElementById(id);
  if (!select) return;
  select.replaceChildren(...options.map(([value, text]) => element("option", {value}, text)));
  select.value = chosen;
  select.addEventListener("change", () => changed(select.value));
}

// A filter for each column: boxes for texts, two ends for numbers.
function filters(place, columns, state, changed) {
  const groups = columns.map((column) => {
    const group = element("fieldset", {}, element("legend", {}, column.title));
    group.append(...(column.categories ? boxes(column, state, changed) : ends(column, state, changed)));
    return group;
  });
  place.replaceChildren(...groups);
}

function boxes(column, state, changed) {
  const marked = () => group.filter((box) => box.checked).map((box) => box.value);
  const group = column.categories.map((text, place) => element("input", {type: "checkbox", value: text, id: `${column.id}-${place}`}));
  for (const box of group) {
    box.checked = true;
    box.addEventListener("change", () => {
      if (marked().length === group.length) delete state.filters[column.id];
      else state.filters[column.id] = {values: marked()};
      changed();
    });
  }
  return group.map((box, place) => element("label", {for: box.id}, box, ` ${(column.labels || column.categories)[place]}`));
}

function ends(column, state, changed) {
  const inputs = ["low", "high"].map((end) => {
    const input = element("input", {type: "number", step: "any", id: `${column.id}-${end}`, placeholder: String(column[end])});
    input.addEventListener("change", () => {
      const [low, high] = inputs.map((each) => each.valueAsNumber);
      if (Number.isNaN(low) && Number.isNaN(high)) delete state.filters[column.id];
      else state.filters[column.id] = {low: Number.isNaN(low) ? column.low : low, high: Number.isNaN(high) ? column.high : high};
      changed();
    });
    return input;
  });
  const unit = column.unit && column.unit !== "x" ? ` [${column.unit}]` : "";
  return inputs.map((input, place) => element("label", {for: input.id}, `${place ? "at most" : "at least"}${unit} `, input));
}

// The best rows, sorted by the column whose heading is pressed.
function table(place, columns, answer, state, changed) {
  const heads = columns.map((column) => {
    const sorted = state.sort.id === column.id;
    const button = element("button", {type: "button"}, column.title + (sorted ? (state.sort.down ? " ▼" : " ▲") : ""));
    button.addEventListener("click", () => {
      state.sort = {id: column.id, down: sorted ? !state.sort.down : column.goal === "maximize" || column.unit === "x"};
      changed();
    });
    const head = element("th", {scope: "col"}, button);
    if (sorted) head.setAttribute("aria-sort", state.sort.down ? "descending" : "ascending");
    return head;
  });
  const body = answer.best.map((row) => element("tr", {}, element("th", {scope: "row"}, element("code", {}, row.key)), ...columns.map(
    (column) => element("td", column.categories ? {} : {class: "number"}, cellText(column, row)))));
  place.replaceChildren(
    place.caption, element("thead", {}, element("tr", {}, element("th", {scope: "col"}, "key"), ...heads)), element("tbody", {}, ...body));
}

function cellText(column, row) {
  if (!column.categories) return row[`${column.id}_text`];
  const text = row[column.id];
  return column.labels ? column.labels[column.categories.indexOf(text)] : text;
}
