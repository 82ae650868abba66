"use strict";
(() => {
  const text = document.getElementById("filter-text");
  const state = document.getElementById("filter-state");
  const told = document.getElementById("filter-count");
  const items = [...document.querySelectorAll("[data-state]")];
  const rows = items.filter((item) => item.tagName === "TR");

  function fits(item) {
    const wanted = state.value;
    const stateFits = !wanted || (wanted === "!PASS" ? item.dataset.state !== "PASS" : item.dataset.state === wanted);
    return stateFits && item.dataset.name.toLowerCase().includes(text.value.trim().toLowerCase());
  }

  function filter() {
    for (const item of items) item.hidden = !fits(item);
    const shown = rows.filter((row) => !row.hidden).length;
    told.value = shown === rows.length ? `${shown} rows` : `${shown} of ${rows.length} rows`;
  }

  // A link may lead into a section that is folded or filtered away.
  function reveal() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (!target) return;
    const section = target.closest("details");
    if (section) {
      if (section.hidden) {
        text.value = "";
        state.value = "";
        filter();
      }
      section.open = true;
    }
    target.scrollIntoView();
    target.focus({ preventScroll: true });
  }

  // The value nearest to the pointer, in words below its chart.
  function point(event) {
    const svg = event.target.closest && event.target.closest(".chart svg");
    const curves = svg ? svg.querySelectorAll(".curve") : [];
    if (!curves.length) return;
    const box = svg.getBoundingClientRect();
    const scale = svg.viewBox.baseVal.width / box.width;
    const x = (event.clientX - box.left) * scale;
    const y = (event.clientY - box.top) * scale;
    let best = { distance: Infinity };
    for (const curve of curves) {
      (curve.getAttribute("d").match(/[-\d.]+,[-\d.]+/g) || []).forEach((place, index) => {
        const [px, py] = place.split(",");
        const distance = (px - x) ** 2 + (py - y) ** 2;
        if (distance < best.distance) best = { distance, curve, index, px, py };
      });
    }
    if (!best.curve) return;
    svg.closest("figure").querySelector(".readout").textContent = words(svg, best.curve.dataset, best.index);
    mark(svg, best.px, best.py);
  }

  function words(svg, { name, at, values, labels }, index) {
    const value = values.split(" ")[index];
    const position = `${svg.dataset.x} ${at.split(" ")[index]}`;
    const label = labels && labels.split("|")[index];
    if (label && svg.dataset.y) return `${label}: ${position}, ${svg.dataset.y} ${value}`;
    return `${name}, ${label || position}: ${value} ${svg.dataset.y || ""}`;
  }

  function mark(svg, x, y) {
    let ring = svg.querySelector("circle");
    if (!ring) {
      ring = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      ring.setAttribute("r", "5");
      svg.append(ring);
    }
    ring.setAttribute("cx", x);
    ring.setAttribute("cy", y);
  }

  document.querySelector(".filter").addEventListener("submit", (event) => event.preventDefault());
  text.addEventListener("input", filter);
  state.addEventListener("change", filter);
  addEventListener("hashchange", reveal);
  document.addEventListener("pointermove", point);
  document.addEventListener("pointerdown", point);
  filter();
  if (location.hash) reveal();
  document.documentElement.dataset.ready = "";
})();
