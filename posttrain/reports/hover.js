// Values under the pointer; a click on a point follows the figure's address.
const nearest = (figure, event) => {
  const data = JSON.parse(figure.dataset.points), svg = figure.querySelector('svg'), box = svg.getBoundingClientRect();
  const [low, high, start, end] = data.scale, at = (event.clientX - box.left) / box.width * data.width;
  const value = low + (at - start) / (end - start) * (high - low);
  let x = null;
  for (const line of data.lines) for (const one of line.x) {
    if (x === null || Math.abs(one - value) < Math.abs(x - value)) x = one;
  }
  return { data, svg, box, x, pixel: start + (x - low) / (high - low) * (end - start) };
};
const tip = document.createElement('div');
tip.className = 'tip';
const hide = () => { tip.remove(); element.querySelectorAll('.cross').forEach((one) => one.setAttribute('x1', -9) || one.setAttribute('x2', -9)); };
element.addEventListener('pointermove', (event) => {
  const figure = event.target.closest('figure[data-points]');
  if (!figure || !event.target.closest('svg')) return hide();
  const { data, svg, box, x, pixel } = nearest(figure, event), cross = svg.querySelector('.cross');
  if (x === null) return;
  cross.setAttribute('x1', pixel);
  cross.setAttribute('x2', pixel);
  tip.replaceChildren(Object.assign(document.createElement('b'), { textContent: `${data.label} ${+x.toPrecision(6)}` }));
  for (const line of data.lines) {
    const place = line.x.indexOf(x);
    if (place < 0 || line.y[place] === null) continue;
    tip.append(Object.assign(document.createElement('span'), { className: `key c${line.c}`, textContent: `${line.label} ${line.y[place]}` }));
  }
  element.append(tip);
  const left = box.left + pixel / data.width * box.width, narrow = left + tip.offsetWidth + 20 > innerWidth;
  tip.style.left = `${left + (narrow ? -tip.offsetWidth - 12 : 12)}px`;
  tip.style.top = `${box.top + 12}px`;
});
element.addEventListener('pointerleave', hide);
