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
  const act = event.target.closest('[data-act]')?.dataset.act;
  if (act) {
    const form = element.querySelector('form[data-go]');
    clearTimeout(typing);
    if (form) history.replaceState(null, '', addressOf(form));
    element.classList.add('waiting');
    trigger('submit', { address: location.search, act });
    return;
  }
  if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
  const link = event.target.closest('a[data-go]');
  const url = link && new URL(link.href);
  if (!url || url.origin !== location.origin || url.pathname !== location.pathname) return;
  event.preventDefault();
  typed = null;
  show(url.href, true);
});
const addressOf = (form) => {
  const values = [...new FormData(form)].filter(([, value]) => value !== '');
  return `${location.pathname}?${new URLSearchParams(values)}`;
};
const submit = (form) => show(addressOf(form), true);
element.addEventListener('submit', (event) => { event.preventDefault(); submit(event.target); });
// A field to type in is read as one types: its change is no news, and would replace a button that is being pressed.
element.addEventListener('change', (event) => {
  if (event.target.form && event.target.type !== 'search') submit(event.target.form);
});
let typing = 0, typed = null;
element.addEventListener('input', (event) => {
  if (event.target.type !== 'search') return;
  typed = event.target.value;
  caret = event.target.selectionStart;
  clearTimeout(typing);
  const name = event.target.name; // by then the field may have been replaced
  typing = setTimeout(() => {
    const form = element.querySelector(`[name="${CSS.escape(name)}"]`)?.form;
    if (form) submit(form);
  }, 400);
});
window.addEventListener('popstate', () => { typed = null; show(location.href, false); });

// What had the keyboard's focus, and what was open, is so again after the content was replaced.
const nameOf = (one) => one.id || (one.name && `${one.name}=${one.type === 'radio' ? one.value : ''}`) || one.getAttribute?.('href');
let focus = null, caret = null, open = [];
element.addEventListener('focusin', (event) => {
  if (nameOf(event.target) !== focus) typed = caret = null;
  focus = nameOf(event.target);
});
element.addEventListener('keyup', (event) => { caret = event.target.selectionStart ?? null; });
element.addEventListener('focusout', (event) => { if (event.target.isConnected && event.relatedTarget) focus = null; });
element.addEventListener('toggle', () => {
  open = [...element.querySelectorAll('details[open] > summary')].map((one) => one.textContent);
}, true);
watch('value', () => {
  element.classList.remove('waiting');
  const opened = open;
  setTimeout(() => restore(opened)); // Gradio changes the elements right after this
});
const restore = (opened) => {
  for (const one of element.querySelectorAll('details > summary')) {
    if (opened.includes(one.textContent)) one.parentElement.open = true;
  }
  const again = focus && [...element.querySelectorAll('a, input, select, button')].find((one) => nameOf(one) === focus);
  if (again && document.activeElement !== again) {
    again.focus({ preventScroll: true });
    if (again.type === 'search') again.setSelectionRange(caret ?? again.value.length, caret ?? again.value.length);
  }
};
// Gradio changes elements in place: a choice follows its new options, and what was typed since it was sent stays.
new MutationObserver(() => {
  for (const one of element.querySelectorAll('option[selected]')) one.parentElement.value = one.value;
  for (const one of element.querySelectorAll('input[type=radio][checked]')) one.checked = true;
  const field = document.activeElement;
  if (typed === null || !element.contains(field) || nameOf(field) !== focus || field.value === typed) return;
  field.value = typed;
  field.setSelectionRange(caret, caret);
}).observe(element, { subtree: true, childList: true, attributes: true, attributeFilter: ['name', 'value', 'selected', 'checked'] });

// A click on a point of a curve follows the figure's address; posttrain/reports/hover.js has `nearest`.
element.addEventListener('click', (event) => {
  const figure = event.target.closest('figure[data-at]');
  if (!figure || !event.target.closest('svg')) return;
  const url = new URL(figure.dataset.at + nearest(figure, event).x, location.href);
  url.pathname === location.pathname ? show(url.href, true) : location.assign(url.href);
});
