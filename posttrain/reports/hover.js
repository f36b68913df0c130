// Shows the values of a chart's lines under the pointer, or at the next point for an arrow key, in charts inside `element`.
const points = new WeakMap();
const pointsOf = (figure) => {
  if (points.get(figure)?.text !== figure.dataset.points) {
    const data = JSON.parse(figure.dataset.points);
    data.xs = [...new Set(data.lines.flatMap((line) => line.x))].sort((one, other) => one - other);
    points.set(figure, { text: figure.dataset.points, data });
  }
  return points.get(figure).data;
};
const pixelOf = (data, x) => data.scale[2] + (x - data.scale[0]) / (data.scale[1] - data.scale[0]) * (data.scale[3] - data.scale[2]);
const nearest = (figure, event) => {
  const data = pointsOf(figure), box = figure.querySelector('svg').getBoundingClientRect();
  const [low, high, start, end] = data.scale, at = (event.clientX - box.left) / box.width * data.width;
  const value = low + (at - start) / (end - start) * (high - low);
  return { x: data.xs.reduce((best, one) => Math.abs(one - value) < Math.abs(best - value) ? one : best, data.xs[0]) };
};
const tip = document.createElement('div');
tip.className = 'tip';
const cross = (figure, pixel) => ['x1', 'x2'].forEach((end) => figure.querySelector('.cross').setAttribute(end, pixel));
const hide = () => {
  tip.remove();
  element.querySelectorAll('figure[data-points]').forEach((figure) => cross(figure, -9));
};
const point = (figure, x) => {
  const data = pointsOf(figure), box = figure.querySelector('svg').getBoundingClientRect();
  figure.dataset.x = x;
  for (const other of figure.parentElement.querySelectorAll(':scope > figure[data-points]')) {  // all charts of a group
    const theirs = pointsOf(other), inside = x >= theirs.scale[0] && x <= theirs.scale[1];
    cross(other, inside && theirs.label === data.label ? pixelOf(theirs, x) : -9);
  }
  tip.replaceChildren(Object.assign(document.createElement('b'), { textContent: `${data.label} ${+x.toPrecision(6)}${data.smooth ? ', smoothed' : ''}` }));
  for (const line of data.lines) {
    const place = line.x.indexOf(x);
    if (place < 0 || line.y[place] === null) continue;
    tip.append(Object.assign(document.createElement('span'), { className: `key c${line.c}`, textContent: `${line.label} ${line.y[place]}` }));
  }
  element.append(tip);
  const left = box.left + pixelOf(data, x) / data.width * box.width, narrow = left + tip.offsetWidth + 20 > innerWidth;
  tip.style.left = `${Math.max(4, left + (narrow ? -tip.offsetWidth - 12 : 12))}px`;
  tip.style.top = `${box.top + 12}px`;
};
element.addEventListener('pointermove', (event) => {
  const figure = event.target.closest('figure[data-points]');
  if (figure && event.target.closest('svg')) point(figure, nearest(figure, event).x);
  else hide();
});
element.addEventListener('pointerleave', hide);
element.addEventListener('focusout', hide);
element.addEventListener('keydown', (event) => {
  const figure = event.target.closest('figure[data-points]'), way = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!figure || !way) return;
  event.preventDefault();
  const { xs } = pointsOf(figure), at = xs.indexOf(+figure.dataset.x);
  point(figure, xs[at < 0 ? (way > 0 ? 0 : xs.length - 1) : Math.min(Math.max(at + way, 0), xs.length - 1)]);
});
