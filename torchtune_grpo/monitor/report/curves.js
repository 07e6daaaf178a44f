"use strict";
// Draws the panels with bokeh, over one range of steps: zooming in one zooms in all.
const SMOOTH_FROM = 60; // steps; fewer are drawn as they are

// A colour of the style sheet, by its number: light and dark differ.
function colour(number) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--c${number}`).trim();
}

function plain(number) {
  return number === null ? NaN : number;
}

function movingMean(values, width) {
  return values.map((_, at) => {
    const near = values.slice(Math.max(0, at - width), at + width + 1);
    return near.reduce((sum, value) => sum + value, 0) / near.length;
  });
}

function emptyPlot(steps, yRange, height) {
  const plot = Bokeh.Plotting.figure({
    height, sizing_mode: "stretch_width", x_range: steps, y_range: yRange, window_axis: "x", tools: [], toolbar_location: null,
    background_fill_color: null, border_fill_color: null, outline_line_color: null,
  });
  for (const axis of [plot.xaxis, plot.yaxis]) {
    axis.axis_line_color = colour(9);
    axis.major_tick_line_color = null;
    axis.minor_tick_line_color = null;
    axis.major_label_text_color = colour(8);
    axis.major_label_text_font = "system-ui, sans-serif";
  }
  plot.xaxis.ticker = new Bokeh.BasicTicker({ min_interval: 1 });
  plot.xgrid.grid_line_color = null;
  plot.ygrid.grid_line_color = colour(9);
  if (!matchMedia("(pointer: coarse)").matches) { // where a drag scrolls the page
    const zoom = new Bokeh.BoxZoomTool({ dimensions: "width" });
    plot.add_tools(zoom);
    plot.toolbar.active_drag = zoom;
  }
  return plot;
}

function rangeOf({ axis, kind }) {
  if (axis === "share") return new Bokeh.Range1d(kind === "stack" ? { start: 0, end: 1 } : { start: -0.03, end: 1.03 });
  return new Bokeh.DataRange1d(axis === "from 0" ? { start: 0 } : {});
}

// Its columns at all steps of the panel: values v0, v1, ..., bands l0, h0, ..., and y, the first value that is known.
function sourceOf(lines) {
  const step = [...new Set(lines.flatMap((line) => line.steps))].sort((a, b) => a - b);
  const columns = { step };
  lines.forEach((line, number) => {
    const place = new Map(line.steps.map((at, position) => [at, position]));
    const on = (values) => step.map((at) => (place.has(at) ? plain(values[place.get(at)]) : NaN));
    columns[`v${number}`] = on(line.values);
    if (line.low) Object.assign(columns, { [`l${number}`]: on(line.low), [`h${number}`]: on(line.high) });
  });
  const values = lines.map((_, number) => columns[`v${number}`]);
  columns.y = step.map((_, at) => values.map((each) => each[at]).find(Number.isFinite) ?? NaN);
  return new Bokeh.ColumnDataSource({ data: columns });
}

function drawLine(plot, panel, line, paint) {
  const known = line.steps.map((step, at) => [step, line.values[at]]).filter(([, value]) => value !== null);
  const steps = known.map(([step]) => step);
  let values = known.map(([, value]) => value);
  if (panel.kind === "dots") plot.scatter(steps, values, { size: 5, color: paint });
  if (panel.kind === "lines" && values.length >= SMOOTH_FROM) {
    plot.line(steps, values, { line_color: paint, line_alpha: 0.3 });
    values = movingMean(values, Math.round(values.length / 50));
  }
  plot.line(steps, values, { line_color: paint, line_width: 2 });
}

function drawPanel(panel, steps, resumes) {
  const plot = emptyPlot(steps, rangeOf(panel), 190);
  const share = panel.axis === "share";
  if (share) {
    plot.yaxis.formatter = new Bokeh.NumeralTickFormatter({ format: "0%" });
    plot.yaxis.ticker = new Bokeh.FixedTicker({ ticks: [0, 0.25, 0.5, 0.75, 1] });
  }
  const source = sourceOf(panel.lines);
  const tips = [["step", "@step"]];
  panel.lines.forEach((line, number) => {
    const paint = colour(line.colour);
    if (line.low) {
      plot.varea({ field: "step" }, { field: `l${number}` }, { field: `h${number}` },
        { source, fill_color: paint, fill_alpha: panel.kind === "stack" ? 0.85 : 0.16 });
    }
    if (panel.kind !== "stack") drawLine(plot, panel, line, paint);
    tips.push([line.label, `@v${number}{${share ? "0.0%" : "0.[0000]"}}`]);
  });
  for (const step of resumes) {
    plot.add_layout(new Bokeh.Span({ location: step + 0.5, dimension: "height", line_color: colour(8), line_dash: [5, 4] }));
  }
  // A line answers between its points too, for the nearest; but one of a single point never does.
  const [x, y] = [{ field: "step" }, { field: "y" }];
  const hovered = source.data.step.length > 1 ? plot.line(x, y, { source, line_alpha: 0 }) :
    plot.scatter(x, y, { source, size: 40, fill_alpha: 0, line_alpha: 0 });
  plot.add_tools(new Bokeh.HoverTool({ renderers: [hovered], mode: "vline", tooltips: tips }));
  return plot;
}

// Nothing in a curve answers to a key, so none of it stops the tab key.
function leaveTabOrder(node) {
  for (const each of [...node.querySelectorAll("*"), ...(node.shadowRoot?.querySelectorAll("*") ?? [])]) {
    if (each.tabIndex >= 0) each.tabIndex = -1;
    if (each.shadowRoot) leaveTabOrder(each);
  }
}

// Draws panel i into the element `panel-i`.
async function drawCurves(panels, resumes, reset) {
  const last = Math.max(1, ...panels.flatMap((panel) => panel.lines.map((line) => line.steps.at(-1))));
  const whole = { start: -0.02 * last, end: 1.02 * last + 0.5 };
  const steps = new Bokeh.Range1d(whole);
  const run = new Bokeh.Document();
  panels.forEach((panel) => run.add_root(drawPanel(panel, steps, resumes)));
  const places = run.roots().map((_, at) => document.getElementById(`panel-${at}`));
  await Bokeh.embed.add_document_standalone(run, document.body, places);
  places.forEach(leaveTabOrder);
  steps.change.connect(() => {
    reset.hidden = steps.start === whole.start && steps.end === whole.end;
    // The zoom tool has fixed its panel's y axis where it was; it follows the steps again.
    queueMicrotask(() => run.roots().forEach((plot) => plot.y_range.reset()));
  });
  reset.onclick = () => steps.setv(whole);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
}
