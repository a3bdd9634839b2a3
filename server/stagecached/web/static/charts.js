// Canvas drawings. Colours come from the style sheet, so both themes and a change of them are one code path.

const styles = () => getComputedStyle(document.documentElement);
export const colour = (name) => styles().getPropertyValue(`--${name}`).trim();

// A context in CSS pixels, cleared, sharp on any screen.
export function canvas(element) {
  const ratio = window.devicePixelRatio || 1;
  const box = element.getBoundingClientRect();
  const width = Math.max(1, Math.round(box.width)), height = Math.max(1, Math.round(box.height));
  if (element.width !== Math.round(width * ratio) || element.height !== Math.round(height * ratio)) {
    element.width = Math.round(width * ratio);
    element.height = Math.round(height * ratio);
  }
  const context = element.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

// The next of 1, 2, 5, 10, ... at or above a value.
function niceCeil(value) {
  const scale = 10 ** Math.floor(Math.log10(Math.max(value, 1e-9)));
  return [1, 2, 5, 10].map((step) => step * scale).find((step) => step >= value * 0.999);
}

// A small area without axes.
export function spark(element, values, name) {
  const { context, width, height } = canvas(element);
  const known = values.filter((value) => value != null);
  if (known.length < 2) return;
  const top = Math.max(...known) * 1.15 || 1;
  const x = (index) => (index / (values.length - 1)) * width;
  const y = (value) => height - 2 - (value / top) * (height - 6);
  const runs = connected(values);
  for (const run of runs) {
    context.beginPath();
    run.forEach(([index, value], at) => (at ? context.lineTo(x(index), y(value)) : context.moveTo(x(index), y(value))));
    context.strokeStyle = colour(name);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke();
    context.lineTo(x(run[run.length - 1][0]), height);
    context.lineTo(x(run[0][0]), height);
    context.fillStyle = colour(`${name}-soft`);
    context.fill();
  }
}

// Stretches of values without a gap, as [index, value].
function connected(values) {
  const runs = [];
  let run = [];
  values.forEach((value, index) => {
    if (value == null) {
      if (run.length) runs.push(run);
      run = [];
    } else run.push([index, value]);
  });
  if (run.length) runs.push(run);
  return runs;
}

const when = (ago) => (ago >= 60 ? `${Math.floor(ago / 60)} min ${ago % 60} s ago` : ago ? `${ago} s ago` : "now");
const SPANS = [120, 300, 900];
const TICKS = { 120: 30, 300: 60, 900: 180 };

// An area chart over time. layers: [{values, name, label}], stacked in this order; t: seconds before now, negative.
export class TimeChart {
  constructor(element, tip, { format, top = null }) {
    this.element = element;
    this.format = format;
    this.fixedTop = top;
    this.span = SPANS[0];
    this.layers = [];
    this.t = [];
    this.hover = null;
    this.tip = tip;
    element.addEventListener("pointermove", (event) => this.onMove(event));
    element.addEventListener("pointerleave", () => {
      this.hover = null;
      tip.hide();
      this.draw();
    });
  }

  show(t, layers) {
    this.t = t;
    this.layers = layers;
    this.span = SPANS.find((span) => t.length && span >= -t[0]) ?? SPANS[0];
    this.draw();
  }

  draw() {
    const { context, width, height } = canvas(this.element);
    const left = 46, right = 6, top = 8, bottom = 20;
    const w = width - left - right, h = height - top - bottom;
    const sums = this.t.map((_, index) => this.layers.reduce((sum, layer) => sum + (layer.values[index] ?? 0), 0));
    const max = this.fixedTop ?? niceCeil(Math.max(1, ...sums));
    const x = (seconds) => left + (1 + seconds / this.span) * w;
    const y = (value) => top + h - (value / max) * h;
    this.x = x;
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (let step = 0; step <= 4; step++) {
      const value = (max * step) / 4;
      const at = Math.round(y(value)) + 0.5;
      context.strokeStyle = colour("line");
      context.lineWidth = 1;
      context.beginPath();
      context.moveTo(left, at);
      context.lineTo(width - right, at);
      context.stroke();
      if (step % 2 === 0) {
        context.fillStyle = colour("dim");
        context.fillText(this.format(value), left - 8, at);
      }
    }
    context.textBaseline = "alphabetic";
    context.fillStyle = colour("dim");
    for (let ago = this.span; ago >= 0; ago -= TICKS[this.span]) {
      context.textAlign = ago === this.span ? "left" : ago ? "center" : "right";
      context.fillText(ago % 60 ? `${ago} s` : ago ? `${ago / 60} min` : "now", x(-ago), height - 5);
    }
    const base = this.t.map(() => 0);
    for (const layer of this.layers) this.area(context, layer, base, x, y);
    if (!this.t.length) {
      context.textAlign = "center";
      context.fillText("The first points come in ten seconds.", left + w / 2, top + h / 2);
    }
    if (this.hover != null) {
      context.strokeStyle = colour("dim");
      context.beginPath();
      context.moveTo(x(this.t[this.hover]), top);
      context.lineTo(x(this.t[this.hover]), top + h);
      context.stroke();
    }
  }

  area(context, layer, base, x, y) {
    for (const run of connected(layer.values)) {
      const upper = run.map(([index, value]) => [x(this.t[index]), y(base[index] + value)]);
      const lower = run.map(([index]) => [x(this.t[index]), y(base[index])]).reverse();
      if (run.length === 1) {
        context.fillStyle = colour(layer.name);
        context.fillRect(upper[0][0] - 1.5, upper[0][1] - 1.5, 3, 3);
        continue;
      }
      context.beginPath();
      upper.forEach(([px, py], at) => (at ? context.lineTo(px, py) : context.moveTo(px, py)));
      context.strokeStyle = colour(layer.name);
      context.lineWidth = 1.8;
      context.lineJoin = "round";
      context.stroke();
      lower.forEach(([px, py]) => context.lineTo(px, py));
      context.fillStyle = colour(`${layer.name}-soft`);
      context.fill();
    }
    layer.values.forEach((value, index) => (base[index] += value ?? 0));
  }

  onMove(event) {
    if (!this.t.length || !this.x) return;
    const at = event.clientX - this.element.getBoundingClientRect().left;
    let best = 0;
    this.t.forEach((seconds, index) => {
      if (Math.abs(this.x(seconds) - at) < Math.abs(this.x(this.t[best]) - at)) best = index;
    });
    this.hover = best;
    const ago = -this.t[best];
    const lines = this.layers.map((layer) => `${layer.label}: ${this.format(layer.values[best])}`);
    this.tip.show(event, `${when(ago)}\n${lines.join("\n")}`);
    this.draw();
  }
}

// Mixes two #rrggbb colours.
function mix(from, to, share) {
  const part = (hex, at) => parseInt(hex.slice(at, at + 2), 16);
  const channel = (at) => Math.round(part(from, at) + (part(to, at) - part(from, at)) * share);
  return `rgb(${channel(1)}, ${channel(3)}, ${channel(5)})`;
}

// Place of an age on the ramp from now to the oldest, logarithmic.
const ageShare = (seconds, oldest) => Math.min(1, Math.log10(1 + Math.max(0, seconds)) / Math.log10(1 + oldest));

export function ramp(element) {
  const { context, width, height } = canvas(element);
  const fresh = colour("fresh"), old = colour("old");
  for (let at = 0; at < width; at++) {
    context.fillStyle = mix(fresh, old, at / width);
    context.fillRect(at, 0, 1, height);
  }
}

const MAP_HEIGHT = 300;

// A pool's blocks as squares, left to right, top to bottom.
export class PoolMap {
  constructor(element, tip, describe) {
    this.element = element;
    this.map = null;
    element.addEventListener("pointermove", (event) => {
      const cell = this.cellAt(event);
      if (cell == null) tip.hide();
      else tip.show(event, describe(this.map, cell));
    });
    element.addEventListener("pointerleave", () => tip.hide());
  }

  show(map) {
    this.map = map;
    this.oldest = Math.max(60, ...(map?.age_s ?? []).filter((seconds) => seconds != null));
    this.draw();
  }

  draw() {
    const map = this.map;
    if (!map) return void canvas(this.element);
    const cells = map.present.length;
    const room = this.element.clientWidth;
    let columns = 1;
    while (Math.floor(room / columns) * Math.ceil(cells / columns) > MAP_HEIGHT && columns < 4096) columns++;
    const size = Math.max(3, Math.min(26, Math.floor(room / columns)));
    columns = Math.floor(room / size);
    Object.assign(this, { size, columns });
    this.element.style.height = `${Math.ceil(cells / columns) * size}px`;
    const { context } = canvas(this.element);
    const gap = size > 7 ? 2 : 1;
    const fresh = colour("fresh"), old = colour("old");
    const empty = colour("empty"), absent = colour("absent"), pending = colour("pending");
    const box = size - gap, radius = Math.min(3, box / 4);
    for (let cell = 0; cell < cells; cell++) {
      const px = (cell % columns) * size, py = Math.floor(cell / columns) * size;
      context.fillStyle = empty;
      context.beginPath();
      context.roundRect(px, py, box, box, radius);
      context.fill();
      let from = py + box;
      const parts = [
        [map.present[cell], mix(fresh, old, ageShare(map.age_s[cell] ?? 0, this.oldest))],
        [map.absent[cell], absent],
        [map.pending[cell], pending],
      ];
      context.save();
      context.clip();
      for (const [share, fill] of parts) {
        const part = Math.min((share / 100) * box, from - py);
        if (part <= 0) continue;
        context.fillStyle = fill;
        context.fillRect(px, from - part, box, part);
        from -= part;
      }
      context.restore();
    }
  }

  cellAt(event) {
    if (!this.map || !this.size) return null;
    const box = this.element.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.size);
    const cell = column + Math.floor((event.clientY - box.top) / this.size) * this.columns;
    return column < this.columns && cell >= 0 && cell < this.map.present.length ? cell : null;
  }
}

export const kindColour = (kind) => colour({ save: "save", begin: "gather", flush: "save" }[kind] ?? "other");

// Records as bars, the newest at the right; height grows with the rows, on a logarithmic scale.
export function strip(element, timeline, spanMs) {
  const { context, width, height } = canvas(element);
  for (const [kind, , rows, gathers, published] of timeline) {
    const share = Math.min(1, Math.log10(1 + Math.max(rows, gathers)) / 3.4);
    const tall = Math.max(4, share * (height - 6));
    context.fillStyle = kindColour(kind);
    context.globalAlpha = 0.8;
    context.fillRect(width * (1 - published / spanMs), height - tall, 2, tall);
  }
  context.globalAlpha = 1;
}
