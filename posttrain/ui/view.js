// Links and forms marked data-go change the address and ask the server for what it shows; the rest of the page stays.
const show = (address, push) => {
  if (push) history.pushState(null, '', address);
  element.classList.add('waiting');
  trigger('click', { address: location.search });
};
element.addEventListener('click', (event) => {
  const copied = event.target.closest('[data-copy]');
  if (copied) {
    const said = copied.textContent;
    navigator.clipboard.writeText(copied.dataset.copy).then(() => {
      copied.textContent = 'Copied';
      setTimeout(() => { copied.textContent = said; }, 1500);
    });
    return;
  }
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = event.target.closest('a[data-go]');
  const url = link && new URL(link.href);
  if (!url || url.origin !== location.origin || url.pathname !== location.pathname) return;
  event.preventDefault();
  show(url.href, true);
});
const submit = (form) => {
  const values = [...new FormData(form)].filter(([, value]) => value !== '');
  show(`${location.pathname}?${new URLSearchParams(values)}`, true);
};
element.addEventListener('submit', (event) => { event.preventDefault(); submit(event.target); });
element.addEventListener('change', (event) => { if (event.target.form) submit(event.target.form); });
let typing = 0;
element.addEventListener('input', (event) => {
  if (event.target.type !== 'search') return;
  clearTimeout(typing);
  typing = setTimeout(() => { if (event.target.isConnected) submit(event.target.form); }, 400);
});
window.addEventListener('popstate', () => show(location.href, false));

// What had the keyboard's focus, and what was open, is so again after the content was replaced.
const nameOf = (one) => one.id || (one.name && `${one.name}=${one.type === 'radio' ? one.value : ''}`) || one.getAttribute?.('href');
let focus = null, caret = null, open = [];
element.addEventListener('focusin', (event) => { focus = nameOf(event.target); });
element.addEventListener('keyup', (event) => { caret = event.target.selectionStart ?? null; });
element.addEventListener('focusout', (event) => { if (event.target.isConnected && event.relatedTarget) focus = null; });
element.addEventListener('toggle', () => {
  open = [...element.querySelectorAll('details[open] > summary')].map((one) => one.textContent);
}, true);
watch('value', () => {
  element.classList.remove('waiting');
  for (const one of element.querySelectorAll('details > summary')) {
    if (open.includes(one.textContent)) one.parentElement.open = true;
  }
  const again = focus && [...element.querySelectorAll('a, input, select, button')].find((one) => nameOf(one) === focus);
  if (again && document.activeElement !== again) {
    again.focus({ preventScroll: true });
    if (again.type === 'search') again.setSelectionRange(caret ?? again.value.length, caret ?? again.value.length);
  }
});

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
element.addEventListener('click', (event) => {
  const figure = event.target.closest('figure[data-at]');
  if (!figure || !event.target.closest('svg')) return;
  const url = new URL(figure.dataset.at + nearest(figure, event).x, location.href);
  url.pathname === location.pathname ? show(url.href, true) : location.assign(url.href);
});
