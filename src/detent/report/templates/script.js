"use strict";
(() => {
  const root = document.documentElement;
  const find = (id) => document.getElementById(id);
  root.classList.remove("no-js");

  // The theme is that of the system until the button is pressed. The choice is not stored.
  const theme = find("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme || (system.matches ? "dark" : "light")) === "dark";
  const showTheme = () => {
    theme.textContent = isDark() ? "Light" : "Dark";
    theme.setAttribute("aria-label", isDark() ? "Use light colors" : "Use dark colors");
    theme.setAttribute("aria-pressed", String(isDark()));
  };
  theme.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    showTheme();
  });
  system.addEventListener("change", showTheme);
  showTheme();

  find("save-json").addEventListener("click", () => {
    const data = new Blob([find("report-data").textContent], { type: "application/json" });
    const link = document.createElement("a");
    link.href = URL.createObjectURL(data);
    link.download = `${document.title.replace(/ · detent$/, "").replace(/[^\w.-]+/g, "_")}.json`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });

  // A click on a row opens or closes its details.
  const table = find("layer-table");
  const bodies = Array.from(table.tBodies);
  const open = (body, yes) => {
    body.rows[1].hidden = !yes;
    body.querySelector(".toggle").setAttribute("aria-expanded", String(yes));
  };
  const isOpen = (body) => !body.rows[1].hidden;
  for (const body of bodies) {
    open(body, false);
    body.rows[0].addEventListener("click", () => {
      if (String(getSelection())) return; // the user is selecting text
      open(body, !isOpen(body));
    });
  }
  const expand = find("expand");
  expand.addEventListener("click", () => {
    const all = expand.getAttribute("aria-pressed") !== "true";
    bodies.forEach((body) => open(body, all));
    expand.setAttribute("aria-pressed", String(all));
    expand.textContent = all ? "Collapse all" : "Expand all";
  });

  // Sorting: unknown values come last in both directions, and equal values keep their order.
  const heads = Array.from(table.tHead.rows[0].cells);
  const chooser = find("sort");
  const collator = new Intl.Collator(undefined, { numeric: true });
  const sortBy = (column, direction) => {
    if (column < 0) {
      table.append(...bodies);
      heads.forEach((head) => head.removeAttribute("aria-sort"));
      return;
    }
    const numeric = heads[column].dataset.kind === "number";
    const value = (body) => body.rows[0].cells[column].dataset.v || "";
    const sign = direction === "ascending" ? 1 : -1;
    const keyed = Array.from(table.tBodies, (body) => [value(body), body]);
    keyed.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === "");
      return sign * (numeric ? Number(a) - Number(b) : collator.compare(a, b));
    });
    table.append(...keyed.map(([, body]) => body));
    heads.forEach((head, i) => {
      if (i === column) head.setAttribute("aria-sort", direction);
      else head.removeAttribute("aria-sort");
    });
    chooser.value = String(column);
  };
  const natural = (column) => (heads[column]?.dataset.kind === "number" ? "descending" : "ascending");
  heads.forEach((head, i) => {
    head.querySelector("button").addEventListener("click", () => {
      const now = head.getAttribute("aria-sort");
      const other = now === "ascending" ? "descending" : "ascending";
      sortBy(i, now ? other : natural(i));
    });
  });
  chooser.value = String(heads.findIndex((head) => head.hasAttribute("aria-sort")));
  chooser.addEventListener("change", () => sortBy(Number(chooser.value), natural(Number(chooser.value))));

  // Filtering: a row is shown if it contains every word of the filter.
  const texts = new Map(bodies.map((body) => [body, body.rows[0].textContent.toLowerCase()]));
  const fits = (status, kind) =>
    kind === "all" || status === kind || (kind === "quantized" && status === "integer");
  const filter = () => {
    const words = find("filter").value.toLowerCase().split(/\s+/).filter(Boolean);
    const kind = document.querySelector('input[name="kind"]:checked').value;
    let shown = 0;
    for (const body of bodies) {
      const text = texts.get(body);
      const yes = fits(body.dataset.status, kind) && words.every((word) => text.includes(word));
      body.hidden = !yes;
      shown += yes;
    }
    const all = bodies.length;
    find("count").textContent = `${shown === all ? "" : `${shown} of `}${all} layer${all === 1 ? "" : "s"}`;
    find("empty").hidden = shown > 0;
  };
  find("tools").addEventListener("input", filter);
  find("tools").addEventListener("submit", (event) => event.preventDefault());
  filter();

  // Charts show tooltips for the pointer and, if a chart has the focus, for the arrow keys.
  const tip = find("tip");
  const place = (x, y) => {
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${Math.max(4, y - box.height - 12)}px`;
  };
  const say = (text, x, y) => {
    if (tip.textContent !== text) tip.textContent = text;
    tip.hidden = false;
    place(x, y);
  };
  const hush = () => {
    tip.hidden = true;
    document.querySelectorAll(".mark").forEach((mark) => mark.remove());
  };
  const short = (value) => String(Number(value.toPrecision(4))).replace("-", "\u2212");
  const read = (chart) => {
    const [low, width, first, last, of, counts] = chart.dataset.h.split("|");
    const list = counts.split(",").map(Number);
    const total = list.reduce((sum, count) => sum + count, 0);
    return { low: +low, width: +width, first: +first, last: +last, of, counts: list, total };
  };
  const showBin = (chart, about, bin) => {
    const { low, width, first, last, of, counts, total } = about;
    chart.dataset.bin = String(bin);
    const from = low + bin * width;
    const scale = 320 / (last - first || 1);
    let mark = chart.querySelector(".mark");
    if (!mark) {
      hush();
      mark = document.createElementNS("http://www.w3.org/2000/svg", "rect");
      mark.setAttribute("class", "mark");
      mark.setAttribute("height", "96");
      chart.append(mark);
    }
    mark.setAttribute("x", String((from - first) * scale));
    mark.setAttribute("width", String(Math.max(width * scale, 1)));
    const half = of === "codes" ? 0.5 : 0;
    const span = of === "codes" && width === 1
      ? `code ${short(from + half)}`
      : `${short(from + half)} to ${short(from + width - half)}`;
    const share = total ? ((100 * counts[bin]) / total).toPrecision(3) : 0;
    const box = chart.getBoundingClientRect();
    const x = box.left + ((from + width / 2 - first) / (last - first || 1)) * box.width;
    say(`${span}: ${counts[bin].toLocaleString("en")} (${Number(share)} %)`, x, box.top);
  };
  const clamp = (about, bin) => Math.max(0, Math.min(about.counts.length - 1, bin));
  for (const chart of document.querySelectorAll(".hist")) {
    let about = null;
    const known = () => (about ??= read(chart));
    chart.addEventListener("pointermove", (event) => {
      const box = chart.getBoundingClientRect();
      const { first, last, low, width } = known();
      const value = first + ((event.clientX - box.left) / box.width) * (last - first);
      const bin = Math.floor((value - low) / width);
      if (bin === clamp(about, bin)) showBin(chart, about, bin);
      else hush();
    });
    chart.addEventListener("pointerleave", hush);
    chart.addEventListener("focus", () => {
      if (!chart.matches(":focus-visible")) return;
      const fullest = known().counts.indexOf(Math.max(...about.counts));
      showBin(chart, about, fullest);
    });
    chart.addEventListener("blur", hush);
    chart.addEventListener("keydown", (event) => {
      const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
      if (event.key === "Escape") hush();
      if (!(event.key in moves)) return;
      event.preventDefault();
      showBin(chart, known(), clamp(known(), Number(chart.dataset.bin || 0) + moves[event.key]));
    });
  }
  for (const dot of document.querySelectorAll("[data-t]")) {
    dot.addEventListener("pointerenter", () => {
      const box = dot.getBoundingClientRect();
      say(dot.dataset.t, box.left, box.top);
    });
    dot.addEventListener("pointerleave", hush);
  }
  const follow = () => {
    if (tip.hidden) return;
    const chart = document.activeElement;
    // A chart with the focus keeps its tooltip, because the browser may have scrolled to bring the chart into view.
    if (chart.matches(".hist:focus-visible")) showBin(chart, read(chart), Number(chart.dataset.bin));
    else hush();
  };
  addEventListener("scroll", follow, { passive: true });

  // For printing, open all details.
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = Array.from(document.querySelectorAll("details:not([open])"));
    closed.forEach((each) => (each.open = true));
  });
  addEventListener("afterprint", () => closed.forEach((each) => (each.open = false)));
})();
