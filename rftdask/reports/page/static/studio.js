/* Scripts of the studio and the report: refresh parts marked data-live while a run is alive, filter the list of runs, draw
   curves with uPlot. Text is inserted as text, never as markup. Links are relative to the page. */
"use strict";

const LIVE_MS = 5000;
const DASHES = [[], [6, 3], [2, 2], [8, 3, 2, 3]];

// ---- live parts

/* Data of a report, whose numbers are in the file; null in the studio. */
const embedded = () => document.getElementById("curves-data");
const isLive = () => embedded() === null && document.querySelector(".running") !== null;

async function renew() {
  const answer = await fetch(location.href);
  if (!answer.ok) return;
  const page = new DOMParser().parseFromString(await answer.text(), "text/html");
  for (const part of document.querySelectorAll("[data-live]")) {
    const fresh = page.querySelector(`[data-live="${part.dataset.live}"]`);
    if (!fresh || fresh.outerHTML === part.outerHTML) continue;
    const ticked = new Set([...part.querySelectorAll("input:checked")].map((box) => box.value));
    const tail = [...part.querySelectorAll("pre.log")].map((log) => log.scrollTop + log.clientHeight >= log.scrollHeight - 4);
    part.replaceWith(fresh);
    for (const box of fresh.querySelectorAll("input[type=checkbox]")) box.checked = ticked.has(box.value);
    fresh.querySelectorAll("pre.log").forEach((log, n) => { if (tail[n] !== false) log.scrollTop = log.scrollHeight; });
  }
  filterRuns();
}

function every(ms, look) {
  let busy = false;
  setInterval(async () => {
    // No requests for a page in the background, nor a second one while the first is pending.
    if (busy || document.hidden) return;
    busy = true;
    try { await look(); } catch { /* the server has stopped, or will answer the next request */ } finally { busy = false; }
  }, ms);
}

// ---- the list of runs

function filterRuns() {
  const filter = document.getElementById("filter");
  if (!filter) return;
  const words = filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  const rows = [...document.querySelectorAll("#runs tbody tr")];
  for (const row of rows) row.classList.toggle("hide", !words.every((word) => row.textContent.toLowerCase().includes(word)));
  const shown = rows.filter((row) => !row.classList.contains("hide")).length;
  document.getElementById("count").textContent = (shown === rows.length ? "" : `${shown} of `) + `${rows.length} run${rows.length === 1 ? "" : "s"}`;
  document.getElementById("compare").disabled = document.querySelectorAll("#runs input:checked").length < 2;
}

// ---- curves

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const tint = (hex, alpha) => hex + Math.round(255 * alpha).toString(16).padStart(2, "0");

/* Exponential moving average with bias correction (as in Adam); skips gaps. */
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

/* One line for several runs: mean, minimum and maximum of the runs with a value at a step. */
function together(lines, smoothing) {
  const at = new Map();
  for (const line of lines) {
    const y = smooth(line.y, smoothing);
    line.step.forEach((step, n) => {
      if (y[n] === null || line.x[n] === null) return;
      if (!at.has(step)) at.set(step, { x: [], y: [] });
      at.get(step).x.push(line.x[n]);
      at.get(step).y.push(y[n]);
    });
  }
  const mean = (values) => values.reduce((a, b) => a + b, 0) / values.length;
  const points = [...at.entries()].sort((a, b) => a[0] - b[0]).map(([, point]) => point);
  return {
    x: points.map((p) => mean(p.x)),
    mean: points.map((p) => mean(p.y)),
    low: points.map((p) => Math.min(...p.y)),
    high: points.map((p) => Math.max(...p.y)),
  };
}

function number(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e9) return (value / 1e9).toPrecision(3) + "G";
  if (size >= 1e6) return (value / 1e6).toPrecision(3) + "M";
  if (size >= 1e4) return (value / 1e3).toPrecision(3) + "k";
  if (size > 0 && size < 1e-3) return value.toExponential(1);
  return String(Number(value.toPrecision(4)));
}

function clock(seconds) {
  const s = Math.round(seconds), two = (n) => String(n).padStart(2, "0");
  const h = Math.floor(s / 3600), m = Math.floor(s / 60) % 60;
  return h ? `${h}:${two(m)}:${two(s % 60)}` : `${m}:${two(s % 60)}`;
}

class Curves {
  constructor(host) {
    this.host = host;
    this.plots = [];
    this.open = new Set();
    this.controls = Object.fromEntries(["x", "smooth", "log", "metric"].map((id) => [id, document.getElementById(id)]));
    for (const control of Object.values(this.controls)) control.addEventListener("input", () => this.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
    let width = innerWidth;
    addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; this.draw(); } });
  }

  async load() {
    let text = embedded()?.textContent;
    if (text === undefined) {
      const answer = await fetch(this.host.dataset.curves + location.search);
      text = await answer.text();
      if (!answer.ok) throw new Error(`${answer.status}`);
    }
    if (text === this.text) return;
    this.text = text;
    this.data = JSON.parse(text);
    this.draw();
  }

  draw() {
    if (!this.data) return;
    const top = scrollY;
    for (const plot of this.plots) plot.destroy();
    this.plots = [];
    const arms = [...new Set(this.data.runs.map((run) => run.arm))];
    this.colors = new Map(arms.map((arm, n) => [arm, color(`--s${1 + (n % 8)}`)]));
    const wanted = this.controls.metric.value.trim().toLowerCase();
    const fits = (chart) => !wanted || `${chart.key} ${chart.label}`.toLowerCase().includes(wanted);
    const parts = [];
    for (const section of new Set(this.data.charts.map((chart) => chart.section))) {
      const charts = this.data.charts.filter((chart) => chart.section === section && fits(chart));
      if (!charts.length) continue;
      const grid = document.createElement("div");
      grid.className = "charts";
      const isRest = section === "Everything else";
      const part = document.createElement(isRest ? "details" : "section");
      const title = document.createElement("h2");
      title.textContent = isRest ? `${section} (${charts.length})` : section;
      const fill = () => { if (!grid.childElementCount) for (const chart of charts) this.card(grid, chart); };
      if (isRest) {
        const summary = document.createElement("summary");
        summary.append(title);
        part.append(summary, grid);
        part.open = this.open.has(section) || wanted !== "";
        part.addEventListener("toggle", () => { this.open[part.open ? "add" : "delete"](section); if (part.open) fill(); });
      } else part.append(title, grid);
      parts.push([part, !isRest || part.open ? fill : () => {}]);
    }
    const empty = document.createElement("p");
    empty.className = "card dim";
    empty.textContent = wanted ? "No matching metrics." : "No metrics yet.";
    this.host.replaceChildren(...(parts.length ? parts.map(([part]) => part) : [empty]));
    for (const [, fill] of parts) fill(); // after insertion into the page, so that cards have a width
    document.body.dataset.drawn = String(this.plots.length);
    scrollTo(0, top);
  }

  card(grid, chart) {
    const lines = this.lines(chart);
    const stages = [...new Set(lines.map((line) => line.stage))];
    if (!stages.length) return;
    const card = document.createElement("div");
    card.className = stages.length > 2 ? "card wide" : "card";
    card.dataset.chart = chart.key;
    card.title = [chart.formula, chart.advice, chart.source && `Source: ${chart.source}`].filter(Boolean).join("\n");
    const title = document.createElement("h3");
    title.textContent = chart.label;
    const about = document.createElement("p");
    about.className = "dim small";
    about.textContent = [chart.role, chart.unit === "-" ? "" : chart.unit, chart.direction].filter(Boolean).join(" \u00b7 ");
    const panels = document.createElement("div");
    panels.className = "panels";
    card.append(title, about, panels);
    grid.append(card);
    const several = new Set(this.data.runs.flatMap((run) => run.stages.map((s) => s.stage))).size > 1;
    const hosts = stages.map((stage) => {
      const host = document.createElement("div");
      if (several) {
        const name = document.createElement("div");
        name.className = "name";
        name.textContent = stage;
        host.append(name);
      }
      panels.append(host);
      return host;
    });
    stages.forEach((stage, n) => this.plot(hosts[n], chart, lines.filter((line) => line.stage === stage)));
  }

  /* {stage, arm, label, step, x, y} of each run, stage and taskset with the metric. */
  lines(chart) {
    const axis = this.controls.x.value, drawn = [];
    const isOne = this.data.runs.length === 1;
    const lines = new Set(this.data.runs.flatMap((run) => run.stages.flatMap((stage) => Object.keys(stage.y[chart.key] ?? {}))));
    for (const run of this.data.runs) for (const stage of run.stages) {
      for (const [line, y] of Object.entries(stage.y[chart.key] ?? {})) {
        const x = stage.x[line];
        if (!x[axis]) continue;
        const taskset = line.includes("/") ? line.slice(line.indexOf("/") + 1) : "";
        const name = isOne ? taskset || chart.label : taskset && lines.size > 1 ? `${run.arm} \u00b7 ${taskset}` : run.arm;
        drawn.push({ stage: stage.stage, arm: run.arm, taskset, label: name, step: x.step, x: x[axis], y, error: stage.error[chart.key]?.[line] });
      }
    }
    return drawn;
  }

  plot(host, chart, lines) {
    const weight = Number(this.controls.smooth.value), isLog = this.controls.log.checked, axis = this.controls.x.value;
    const positive = (values) => (isLog ? values.map((v) => (v !== null && v > 0 ? v : null)) : values);
    const tasksets = [...new Set(lines.map((line) => line.taskset))];
    const isOne = this.colors.size === 1;
    const tables = [], series = [{ label: axis }], bands = [];
    const value = (_, v) => (v === null || v === undefined ? "-" : axis === "time" ? clock(v) : number(v));
    series[0].value = value;
    for (const label of new Set(lines.map((line) => line.label))) {
      const same = lines.filter((line) => line.label === label);
      const place = tasksets.indexOf(same[0].taskset);
      const stroke = isOne ? color(`--s${1 + (place % 8)}`) : this.colors.get(same[0].arm);
      const shown = { label, stroke, width: 1.8, dash: isOne ? [] : DASHES[place % 4], value: (_, v) => number(v), spanGaps: true };
      shown.points = { show: same[0].y.filter((v) => v !== null).length <= 20, size: 5, fill: stroke };
      if (same.length > 1) {
        const all = together(same, weight);
        tables.push([all.x, positive(all.mean), positive(all.high), positive(all.low)]);
        series.push(shown);
        const at = series.length - 1;
        shown.value = (plot, v, _, n) => (n === null || v === null ? "-" : `${number(v)} (${number(plot.data[at + 2][n])} to ${number(plot.data[at + 1][n])})`);
        for (const edge of ["most", "least"]) series.push({ label: edge, class: "edge", stroke: tint(stroke, 0.35), width: 0.5, points: { show: false }, spanGaps: true, value: (_, v) => number(v) });
        bands.push({ series: [series.length - 2, series.length - 1], fill: tint(stroke, 0.16) });
      } else {
        const defined = same[0].y.map((v, n) => n).filter((n) => same[0].y[n] !== null && same[0].x[n] !== null);
        const x = defined.map((n) => same[0].x[n]), y = defined.map((n) => same[0].y[n]);
        if (weight > 0) {
          tables.push([x, positive(smooth(y, weight)), positive(y)]);
          series.push(shown, { label: "raw", class: "edge", stroke: tint(stroke, 0.3), width: 1, points: { show: false }, spanGaps: true, value: (_, v) => number(v) });
        } else if (same[0].error) {
          // Standard errors as a band: a change within it can be chance.
          const error = defined.map((n) => same[0].error[n] ?? 0), at = series.length;
          tables.push([x, positive(y), positive(y.map((v, n) => v + error[n])), positive(y.map((v, n) => v - error[n]))]);
          shown.value = (plot, v, _, n) => (n === null || v === null ? "-" : `${number(v)} \u00b1 ${number((plot.data[at + 1][n] - plot.data[at + 2][n]) / 2)}`);
          series.push(shown);
          for (const edge of ["above", "below"]) series.push({ label: edge, class: "edge", stroke: tint(stroke, 0.3), width: 0.5, points: { show: false }, spanGaps: true });
          bands.push({ series: [at + 1, at + 2], fill: tint(stroke, 0.14) });
        } else {
          tables.push([x, positive(y)]);
          series.push(shown);
        }
      }
    }
    const data = tables.length > 1 ? uPlot.join(tables) : tables[0];
    if (!data[0].length) return;
    const last = data[0].length - 1;
    const text = color("--dim"), grid = { stroke: tint(color("--grid"), 0.7), width: 1 };
    const ticks = { stroke: text, font: "11px system-ui, sans-serif", grid, ticks: { show: false }, gap: 4 };
    const options = {
      width: Math.max(120, host.clientWidth), height: 190, series, bands,
      padding: [8, 8, 0, 0],
      scales: { x: { time: false }, y: isLog ? { distr: 3 } : { range: (_, low, high) => low === high ? [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2] : uPlot.rangeNum(low, high, 0.08, true) } },
      axes: [
        { ...ticks, size: 24, values: (_, at) => at.map((v) => (axis === "time" ? clock(v) : Number.isInteger(v) || v > 1e4 ? number(v) : "")) },
        { ...ticks, size: 46, values: (_, at) => at.map((v) => (v === null ? "" : number(v))) },
      ],
      cursor: { points: { size: 7 }, drag: { x: true, y: false } },
      legend: { live: true },
      // Without a pointer, the legend shows the newest values.
      hooks: { setCursor: [(plot) => { if (plot.cursor.idx === null || plot.cursor.idx === undefined) plot.setLegend({ idx: last }); }] },
    };
    host.classList.toggle("lone", series.filter((line) => line.class !== "edge").length === 2);
    const plot = new uPlot(options, data, host);
    plot.setLegend({ idx: last });
    this.plots.push(plot);
  }
}

// ---- the start of a page

addEventListener("DOMContentLoaded", () => {
  for (const log of document.querySelectorAll("pre.log")) log.scrollTop = log.scrollHeight;
  const filter = document.getElementById("filter");
  if (filter) {
    filter.addEventListener("input", filterRuns);
    document.getElementById("runs").addEventListener("change", filterRuns);
    filter.addEventListener("keydown", (event) => { if (event.key === "Enter") event.preventDefault(); });
    filterRuns();
  }
  // The list of runs also refreshes for new runs; the page of an ended run does not.
  every(LIVE_MS, async () => { if (filter || isLive()) await renew(); });
  const host = document.getElementById("charts");
  if (host) {
    const curves = (window.curves = new Curves(host)), refresh = document.getElementById("fresh");
    const load = async () => {
      await curves.load();
      refresh.textContent = isLive() ? "refreshed every 5 s" : "";
    };
    load().catch((error) => { host.textContent = `The curves could not be read: ${error.message}`; });
    let wasLive = false; // load once more after the end, for the last values
    every(LIVE_MS, async () => { if (isLive() || wasLive) { wasLive = isLive(); await load(); } });
  }
});
