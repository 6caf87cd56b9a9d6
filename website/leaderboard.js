// Sorts and filters the leaderboard. Empty cells stay at the end in both directions.
(function () {
  const table = document.getElementById("board"), body = table.tBodies[0];
  const heads = [...table.tHead.rows[0].cells], rows = [...body.rows];
  const task = document.getElementById("board-task"), method = document.getElementById("board-method");
  const key = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent : Number(cell.dataset.value);
  };
  const compare = (a, b) => typeof a === typeof b
    ? (typeof a === "number" ? a - b : a.localeCompare(b))
    : (typeof a === "number" ? -1 : 1);
  function sort(column, falling) {
    const missing = (row) => key(row, column) === "" ? 1 : 0;
    rows.sort((a, b) => missing(a) - missing(b)
      || (falling ? -1 : 1) * compare(key(a, column), key(b, column)));
    body.append(...rows);
    heads.forEach((head, i) => head.setAttribute("aria-sort",
      i !== column ? "none" : falling ? "descending" : "ascending"));
  }
  function filter() {
    const part = method.value.toLowerCase();
    for (const row of rows) {
      row.hidden = (task.value !== "" && row.cells[0].textContent !== task.value)
        || !row.cells[1].textContent.toLowerCase().includes(part);
    }
  }
  heads.forEach((head, column) => head.firstChild.addEventListener("click",
    () => sort(column, head.getAttribute("aria-sort") === "ascending")));
  task.addEventListener("change", filter);
  method.addEventListener("input", filter);
  filter();
  sort(3, false);
  document.documentElement.dataset.drawn = "";
})();
