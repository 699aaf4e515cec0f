// Two receipts side by side. The page is whole without this script: adjacent releases are compared in it.
(function () {
  "use strict";
  var data = JSON.parse(document.getElementById("environments").textContent);
  var chooser = document.getElementById("chooser");
  var before = document.getElementById("before");
  var after = document.getElementById("after");
  var only = document.getElementById("only");
  var compared = document.getElementById("compared");
  var body = compared.querySelector("tbody");
  if (data.facts.length < 2) {
    return;
  }
  function factsOf(index) {
    var flat = data.facts[index];
    var found = new Map();
    for (var at = 0; at < flat.length; at += 2) {
      found.set(data.texts[flat[at]], data.texts[flat[at + 1]]);
    }
    return found;
  }
  function cell(row, tag, text) {
    var made = document.createElement(tag);
    // Never as markup: these are names and paths of others. They may be broken after a separator.
    text.split(/(?<=[/_])(?=[^/_])/).forEach(function (piece, place) {
      if (place) {
        made.appendChild(document.createElement("wbr"));
      }
      made.appendChild(document.createTextNode(piece));
    });
    if (tag === "th") {
      made.setAttribute("scope", "row");
    }
    row.appendChild(made);
  }
  function show() {
    var left = factsOf(Number(before.value));
    var right = factsOf(Number(after.value));
    var names = new Set(Array.from(left.keys()).concat(Array.from(right.keys())));
    var differing = 0;
    body.textContent = "";
    names.forEach(function (name) {
      var differs = left.get(name) !== right.get(name);
      differing += differs ? 1 : 0;
      if (!differs && only.checked) {
        return;
      }
      var row = document.createElement("tr");
      row.className = differs ? "differs" : "same";
      cell(row, "td", differs ? "≠ differs" : "= same");
      cell(row, "th", name);
      cell(row, "td", left.get(name) || "not told");
      cell(row, "td", right.get(name) || "not told");
      body.appendChild(row);
    });
    document.getElementById("name-before").textContent = before.selectedOptions[0].textContent;
    document.getElementById("name-after").textContent = after.selectedOptions[0].textContent;
    document.getElementById("told").textContent =
      differing + " of " + names.size + " facts differ" + (differing ? "" : ": these two are the same") + ".";
    compared.hidden = body.rows.length === 0;
  }
  before.selectedIndex = Number(chooser.dataset.before);
  after.selectedIndex = Number(chooser.dataset.after);
  [before, after, only].forEach(function (control) { control.addEventListener("change", show); });
  chooser.hidden = false;
  show();
})();
