"use strict";
// Zooms and moves timelines, and names what is pointed at. Without it the page is whole, only still.
(function () {
  const root = document.documentElement, tip = document.getElementById("tip"), words = new WeakMap();
  const NAMED = 20, TICK = 72;
  window.addEventListener("error", event => { root.dataset.error = event.message; });
  window.addEventListener("unhandledrejection", event => { root.dataset.error = String(event.reason); });

  function duration(seconds) {
    const [unit, size] = Math.abs(seconds) >= 1 || !seconds ? ["s", 1] : Math.abs(seconds) >= 9.995e-4 ? ["ms", 1e-3] : ["µs", 1e-6];
    return +(seconds / size).toPrecision(6) + " " + unit;
  }

  function say(what, x, y) {
    tip.hidden = !what;
    if (tip.hidden) return;
    tip.textContent = words.get(what);
    tip.style.left = Math.max(4, Math.min(x + 14, innerWidth - tip.offsetWidth - 8)) + "px";
    tip.style.top = Math.min(y + 16, innerHeight - tip.offsetHeight - 8) + "px";
  }

  // what has a title says it at once, also where there is a keyboard and no pointer
  function tips(within) {
    for (const each of within.querySelectorAll("[title]")) {
      words.set(each, each.title);
      each.setAttribute("aria-label", each.title);
      each.removeAttribute("title");
      each.addEventListener("pointermove", event => say(each, event.clientX, event.clientY));
      each.addEventListener("focus", () => { const box = each.getBoundingClientRect(); say(each, box.left, box.bottom); });
      for (const name of ["pointerleave", "blur"]) each.addEventListener(name, () => say(null));
    }
  }

  let timelines = [];  // those of one page show the same time

  function timeline(part) {
    const holder = part.querySelector(".view"), svg = holder.querySelector("svg"), frame = JSON.parse(holder.dataset.frame);
    const axis = svg.querySelector(".axis"), plot = svg.querySelector("clipPath rect"), space = svg.namespaceURI;
    const bottom = axis.querySelector("line").getAttribute("y2"), height = svg.viewBox.baseVal.height;
    const boxes = Array.from(svg.querySelectorAll(".box"), group => {
      const title = group.querySelector("title");
      words.set(group, title.textContent);
      title.remove();
      return { group, start: +group.dataset.s, end: +group.dataset.e, rect: group.querySelector("rect"), text: group.querySelector("text") };
    });
    const arrows = Array.from(svg.querySelectorAll(".arrows line"), line => ({ line, start: +line.dataset.s, end: +line.dataset.e }));
    let from = 0, to = frame.span, all = false, pointed = null;

    function ticks() {
      const most = Math.max(1, Math.min(10, Math.floor((frame.right - frame.left) / TICK)));
      const power = Math.pow(10, Math.floor(Math.log10((to - from) / most)));
      const step = [1, 2, 5, 10].map(each => each * power).find(each => (to - from) / each <= most + 0.01);
      axis.replaceChildren();
      for (let count = Math.ceil(from / step - 1e-9); count * step <= to * (1 + 1e-9); count++) {
        const x = frame.left + (count * step - from) / (to - from) * (frame.right - frame.left);
        const line = document.createElementNS(space, "line"), text = document.createElementNS(space, "text");
        for (const [name, value] of [["x1", x], ["x2", x], ["y1", 14], ["y2", bottom], ["stroke", "#d0d7de"]]) line.setAttribute(name, value);
        for (const [name, value] of [["x", x], ["y", 10], ["text-anchor", "middle"]]) text.setAttribute(name, value);
        text.textContent = duration(count * step);
        axis.append(line, text);
      }
    }

    function paint() {
      const scale = (frame.right - frame.left) / (to - from);
      for (const { group, rect, text, start, end } of boxes) {
        const shown = end >= from && start <= to;
        group.style.display = shown ? "" : "none";
        if (!shown) continue;
        // a box that is longer than the view is cut, so that its name is seen
        const left = frame.left + Math.max((start - from) * scale, -9), right = frame.left + Math.min((end - from) * scale, (to - from) * scale + 9);
        rect.setAttribute("x", left);
        rect.setAttribute("width", Math.max(right - left, 0));
        if (text) {
          text.setAttribute("x", (left + right) / 2);
          text.setAttribute("visibility", right - left >= NAMED ? "visible" : "hidden");
        }
      }
      for (const { line, start, end } of arrows) {
        const shown = (all || line.dataset.v === pointed) && end >= from && start <= to;
        line.setAttribute("visibility", shown ? "visible" : "hidden");
        if (!shown) continue;
        line.setAttribute("x1", frame.left + (start - from) * scale);
        line.setAttribute("x2", frame.left + (end - from) * scale);
      }
      ticks();
      root.dataset.view = from.toExponential(6) + " " + to.toExponential(6);
    }

    // one unit is one pixel, so letters are as large on a narrow page
    function layout() {
      const width = Math.max(holder.clientWidth, 240);
      const names = Math.max(...Array.from(svg.querySelectorAll(".row"), each => each.getBBox().width));
      frame.left = Math.min(names + 14, width / 3);
      frame.right = width - 16;
      for (const [name, value] of [["viewBox", `0 0 ${width} ${height}`], ["width", width], ["height", height]]) svg.setAttribute(name, value);
      for (const [name, value] of [["x", frame.left], ["width", frame.right - frame.left]]) plot.setAttribute(name, value);
      paint();
    }

    function view(start, end) {
      const width = Math.min(Math.max(end - start, frame.span * 1e-5), frame.span);
      const begin = Math.min(Math.max(start, 0), frame.span - width);
      for (const each of timelines) each.show(begin, begin + width);
    }

    function zoom(factor, at = (from + to) / 2) { view(at - (at - from) * factor, at + (to - at) * factor); }
    function move(share) { view(from + (to - from) * share, to + (to - from) * share); }
    function pixels() { return svg.getBoundingClientRect().width * (frame.right - frame.left) / svg.viewBox.baseVal.width; }
    function timeAt(event) {
      const box = svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * svg.viewBox.baseVal.width / box.width;
      return from + (x - frame.left) / (frame.right - frame.left) * (to - from);
    }

    const doing = { in: () => zoom(0.5), out: () => zoom(2), all: () => view(0, frame.span), arrows: event => {
      all = !all;
      event.currentTarget.setAttribute("aria-pressed", all);
      paint();
    } };
    for (const button of part.querySelectorAll("[data-do]")) button.addEventListener("click", doing[button.dataset.do]);
    function point(edge) { if (edge !== pointed) { pointed = edge; paint(); } }
    holder.addEventListener("wheel", event => {
      if (document.activeElement !== holder) return;  // the page scrolls
      event.preventDefault();
      if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) move(event.deltaX / pixels());
      else zoom(Math.exp(event.deltaY * 0.002), timeAt(event));
    }, { passive: false });
    holder.addEventListener("keydown", event => {
      const keys = { "+": doing.in, "=": doing.in, "-": doing.out, "0": doing.all, Escape: () => holder.blur(), ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2) };
      if (keys[event.key] && !event.ctrlKey && !event.metaKey) { event.preventDefault(); keys[event.key](); }
    });
    holder.addEventListener("dblclick", doing.all);
    let last = null;
    holder.addEventListener("pointerdown", event => { last = event.clientX; holder.setPointerCapture(event.pointerId); holder.classList.add("drags"); });
    holder.addEventListener("pointermove", event => {
      if (last !== null) { move((last - event.clientX) / pixels()); last = event.clientX; }
      const group = document.elementFromPoint(event.clientX, event.clientY)?.closest(".box");
      say(group && holder.contains(group) ? group : null, event.clientX, event.clientY);
      if (last === null) point(group?.dataset.v ?? null);
    });
    for (const name of ["pointerup", "pointercancel"]) holder.addEventListener(name, () => { last = null; holder.classList.remove("drags"); });
    holder.addEventListener("pointerleave", () => { say(null); point(null); });
    return { layout, view, count: boxes.length, show: (start, end) => { from = start; to = end; paint(); } };
  }

  window.addEventListener("resize", () => { for (const each of timelines) each.layout(); });
  tips(document.body);
  timelines = Array.from(document.querySelectorAll(".timeline"), timeline);
  for (const each of timelines) each.layout();
  root.dataset.ready = String(timelines.reduce((sum, each) => sum + each.count, 0));
  // report.html#view=0.001,0.002 opens at a time
  const asks = /^#view=([0-9.e+-]+),([0-9.e+-]+)$/.exec(location.hash);
  if (asks && +asks[2] > +asks[1] && timelines.length) timelines[0].view(+asks[1], +asks[2]);
})();
