// A cell of the grid opens its panel below its row; the page is whole without this script.
(function () {
  "use strict";
  var buttons = Array.prototype.slice.call(document.querySelectorAll("button[aria-controls]"));
  function panelOf(button) { return document.getElementById(button.getAttribute("aria-controls")); }
  function set(button, open) {
    button.setAttribute("aria-expanded", String(open));
    panelOf(button).hidden = !open;
  }
  buttons.forEach(function (button) {
    button.addEventListener("click", function () {
      var open = button.getAttribute("aria-expanded") !== "true";
      var row = button.closest("tr");
      row.querySelectorAll("button[aria-expanded=true]").forEach(function (other) { set(other, false); });
      set(button, open);
    });
  });
  document.addEventListener("keydown", function (event) {
    if (event.key !== "Escape") { return; }
    var panel = event.target.closest && event.target.closest(".panel-row");
    buttons.forEach(function (button) {
      if (button === event.target || panelOf(button) === panel) {
        if (button.getAttribute("aria-expanded") === "true") { set(button, false); button.focus(); }
      }
    });
  });
  var filter = document.getElementById("eventful");
  if (filter) {
    filter.addEventListener("change", function () { document.body.classList.toggle("only-eventful", filter.checked); });
  }
  // On paper nothing can be opened.
  window.addEventListener("beforeprint", function () {
    document.querySelectorAll("details:not([open])").forEach(function (fold) { fold.open = true; fold.dataset.printed = ""; });
  });
  window.addEventListener("afterprint", function () {
    document.querySelectorAll("details[data-printed]").forEach(function (fold) { fold.open = false; delete fold.dataset.printed; });
  });
})();
