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

// A click on a point of a curve follows the figure's address; posttrain/reports/hover.js has `nearest`.
element.addEventListener('click', (event) => {
  const figure = event.target.closest('figure[data-at]');
  if (!figure || !event.target.closest('svg')) return;
  const url = new URL(figure.dataset.at + nearest(figure, event).x, location.href);
  url.pathname === location.pathname ? show(url.href, true) : location.assign(url.href);
});
