// One number over time on a canvas: an area, its line, a quiet grid.

const LABELS = 16; // pixels below the plot
const TOP = 15; // above it, for the top of the scale

export class Plot {
  // `name` is a column of the series; `most` gives the top of the scale for the numbers in sight.
  constructor(canvas, series, { name, colour, most, words }) {
    Object.assign(this, { canvas, series, name, colour, most, words });
    this.brush = canvas.getContext("2d");
    this.seen = true;
  }

  // `from` and `to` are times; `mark` is one that the person points at, or null.
  draw({ from, to, mark, style }) {
    const { canvas, brush } = this;
    const box = canvas.getBoundingClientRect();
    if (!this.seen || !box.width) return;
    this.fit(box);
    const area = { left: 0.5, right: box.width - 0.5, top: TOP, bottom: box.height - LABELS };
    const first = Math.max(0, this.series.index(from) - 1);
    const last = this.series.index(to + 1e-9);
    const column = this.series.column(this.name).slice(first, last);
    const times = this.series.times.slice(first, last);
    const top = this.most(Math.max(...column.map((number) => number ?? 0), 0));
    const x = (time) => area.left + ((time - from) / (to - from)) * (area.right - area.left);
    const y = (number) => area.bottom - (Math.min(Math.max(number, 0), top) / top) * (area.bottom - area.top);
    brush.clearRect(0, 0, box.width, box.height);
    const scale = column.some((number) => typeof number === "number") ? this.words(top) : "";
    this.grid(area, scale, to - from, style);
    brush.save();
    brush.beginPath();
    brush.rect(area.left, 0, area.right - area.left, area.bottom + 1);
    brush.clip();
    for (const run of this.runs(times, column)) this.curve(run, x, y, area, style);
    brush.restore();
    if (mark !== null) this.point(mark, x, y, area, style);
  }

  // As many pixels as the screen really has.
  fit(box) {
    const ratio = window.devicePixelRatio || 1;
    const [width, height] = [Math.round(box.width * ratio), Math.round(box.height * ratio)];
    if (this.canvas.width !== width || this.canvas.height !== height) Object.assign(this.canvas, { width, height });
    this.brush.setTransform(ratio, 0, 0, ratio, 0, 0);
  }

  grid(area, scale, seconds, style) {
    const { brush } = this;
    brush.strokeStyle = style.line;
    brush.lineWidth = 1;
    brush.beginPath();
    for (const share of [0, 0.5, 1]) {
      const height = Math.round(area.bottom - share * (area.bottom - area.top)) + 0.5;
      brush.moveTo(area.left, height);
      brush.lineTo(area.right, height);
    }
    brush.stroke();
    brush.fillStyle = style.faint;
    brush.font = `11px ${style.font}`;
    brush.textBaseline = "alphabetic";
    const below = area.bottom + LABELS - 3;
    brush.textAlign = "left";
    brush.fillText(`−${Math.round(seconds / 60)} min`, area.left, below);
    brush.textAlign = "right";
    brush.fillText("now", area.right, below);
    brush.fillText(scale, area.right, area.top - 4);
  }

  // Stretches without a gap: what was not read is not drawn.
  *runs(times, column) {
    let run = [];
    for (let i = 0; i < times.length; i += 1) {
      const number = column[i];
      const gap = i > 0 && times[i] - times[i - 1] > this.series.width * 3.5;
      if (run.length && (gap || number === null || number === undefined)) {
        yield run;
        run = [];
      }
      if (number !== null && number !== undefined) run.push([times[i], number]);
    }
    if (run.length) yield run;
  }

  curve(run, x, y, area, style) {
    const { brush } = this;
    brush.fillStyle = brush.strokeStyle = style[this.colour];
    if (run.length === 1) {
      brush.fillRect(x(run[0][0]) - 1, y(run[0][1]) - 1, 2, 2);
      return;
    }
    brush.beginPath();
    for (const [time, number] of run) brush.lineTo(x(time), y(number));
    brush.lineWidth = 1.5;
    brush.lineJoin = "round";
    brush.stroke();
    brush.lineTo(x(run.at(-1)[0]), area.bottom);
    brush.lineTo(x(run[0][0]), area.bottom);
    brush.globalAlpha = 0.13;
    brush.fill();
    brush.globalAlpha = 1;
  }

  point(mark, x, y, area, style) {
    const { brush } = this;
    const i = this.series.nearest(mark);
    if (i < 0) return;
    const across = x(this.series.times[i]);
    brush.strokeStyle = style.faint;
    brush.lineWidth = 1;
    brush.beginPath();
    brush.moveTo(across, area.top);
    brush.lineTo(across, area.bottom);
    brush.stroke();
    const number = this.series.column(this.name)[i];
    if (number === null || number === undefined) return;
    brush.fillStyle = style[this.colour];
    brush.beginPath();
    brush.arc(across, y(number), 3.5, 0, 2 * Math.PI);
    brush.fill();
  }
}
