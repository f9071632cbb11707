// @ts-check
// A loss curve as a line: at most WIDTH points, each the mean of its share of the values.
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 160;
const HEIGHT = 32;
const MARGIN = 2;

/** @param {number[]} values */
export function curve(values) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("class", "curve");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", `loss over ${values.length} operations`);
  if (values.length > 1) svg.append(line(shrink(values)));
  return svg;
}

/** @param {number[]} values */
function line(values) {
  const low = Math.min(...values);
  const span = Math.max(...values) - low || 1;
  /** @param {number} index */
  const x = (index) => (index / (values.length - 1)) * WIDTH;
  /** @param {number} value */
  const y = (value) => HEIGHT - MARGIN - ((value - low) / span) * (HEIGHT - 2 * MARGIN);
  const polyline = document.createElementNS(SVG, "polyline");
  polyline.setAttribute("points", values.map((value, index) => `${x(index).toFixed(1)},${y(value).toFixed(1)}`).join(" "));
  return polyline;
}

/** @param {number[]} values */
function shrink(values) {
  if (values.length <= WIDTH) return values;
  return Array.from({ length: WIDTH }, (_, index) => {
    const share = values.slice(Math.floor((index * values.length) / WIDTH), Math.floor(((index + 1) * values.length) / WIDTH));
    return share.reduce((sum, value) => sum + value, 0) / share.length;
  });
}
