// Numbers as people read them.

export function count(value) {
  if (value == null || !isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)} G`;
  if (size >= 1e6) return `${trim(value / 1e6)} M`;
  if (size >= 1e4) return `${trim(value / 1e3)} k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en");
  return size >= 10 ? value.toFixed(0) : value.toFixed(1);
}

function trim(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : value.toFixed(1).replace(/\.0$/, "");
}

export function bytes(value) {
  if (value == null) return "–";
  for (const [unit, size] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (value >= size) return `${trim(value / size)} ${unit}`;
  }
  return `${value} B`;
}

export function percent(value, digits = 0) {
  if (digits && value > 0 && value < 0.5 * 10 ** (-2 - digits)) return `< ${(10 ** -digits).toFixed(digits)} %`;
  return value == null ? "–" : `${(100 * value).toFixed(value > 0.995 && value < 1 ? 1 : digits)} %`;
}

// Seconds of work: 12 µs, 3.4 ms, 2.1 s.
export function seconds(value) {
  if (value == null || !isFinite(value)) return "–";
  if (value < 1e-3) return `${trim(value * 1e6)} µs`;
  if (value < 1) return `${trim(value * 1e3)} ms`;
  return `${trim(value)} s`;
}

// Seconds of waiting: 4 s, 12 min, 3 h 05 min, 2 d 4 h.
export function age(value) {
  if (value == null) return "–";
  const s = Math.max(0, Math.round(value));
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${String(Math.floor(s / 60) % 60).padStart(2, "0")} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor(s / 3600) % 24} h`;
}
