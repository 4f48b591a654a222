// The numbers of the last hour, side by side. However long the page is open, there are never more points than `most`.

const ALMOST = 0.9; // of `width`: timers are not exact

export class Series {
  constructor(width = 2, most = 2001) {
    this.width = width; // seconds that one point stands for
    this.most = most;
    this.clear();
  }

  clear() {
    this.times = [];
    this.values = new Map(); // name: as many numbers or nulls as there are times
    this.counts = new Map(); // name: how many numbers the last point is the mean of
  }

  load({ width, times, values }) {
    this.clear();
    this.width = width;
    this.most = Math.ceil(3600 / (width * ALMOST)) + 1;
    this.times = times.slice(-this.most);
    for (const [name, column] of Object.entries(values)) this.values.set(name, column.slice(-this.most));
  }

  // `numbers` is a Map of name to number or null.
  add(time, numbers) {
    if (this.times.length && time < this.times.at(-1) - this.width) this.clear(); // the clock was set back
    if (!this.times.length || time - this.times.at(-1) >= this.width * ALMOST) this.begin(time);
    for (const [name, number] of numbers) {
      if (!this.values.has(name)) this.values.set(name, new Array(this.times.length).fill(null));
      if (number === null || number === undefined) continue;
      const column = this.values.get(name);
      const count = (this.counts.get(name) ?? Number(column.at(-1) !== null)) + 1;
      const known = column.at(-1) ?? 0;
      column[column.length - 1] = known + (number - known) / count;
      this.counts.set(name, count);
    }
  }

  begin(time) {
    this.times.push(time);
    this.counts.clear();
    for (const column of this.values.values()) column.push(null);
    if (this.times.length <= this.most) return;
    this.times.shift();
    for (const [name, column] of this.values) {
      column.shift();
      if (column.every((number) => number === null)) this.values.delete(name); // of a GPU that has gone
    }
  }

  column(name) {
    return this.values.get(name) ?? [];
  }

  // The first point at or after a time.
  index(time) {
    let low = 0;
    let high = this.times.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.times[middle] < time) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  // The point nearest to a time, or -1.
  nearest(time) {
    const after = Math.min(this.index(time), this.times.length - 1);
    if (after <= 0) return after;
    return time - this.times[after - 1] < this.times[after] - time ? after - 1 : after;
  }
}
