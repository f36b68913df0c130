// Links, forms and a timer update the page in place: the server returns the content at the new address. Without this script,
// links and forms load whole pages.
const shown = () => element.querySelector('.shown');
let running = null, typing = 0, leaving = false; // the running request, the timer of a search field, whether the page closes
const load = async (address, { push = false, keep = true, timed = false, body = null } = {}) => {
  const url = new URL(address, location.href), mine = new AbortController();
  if (push && url.href !== location.href) history.pushState(null, '', url);
  if (!timed) { clearTimeout(typing); element.classList.add('waiting'); }
  running?.abort();
  running = mine;
  try {
    const headers = { 'x-shown': shown().dataset.version };
    const reply = await fetch(url, { method: body ? 'POST' : 'GET', body, headers, signal: mine.signal });
    const text = await reply.text();
    if (running !== mine) return;
    if (!reply.ok) throw new Error(text);
    const place = new URL(reply.headers.get('content-location') ?? url, url);
    if (place.pathname !== url.pathname) { location.assign(place); return; }
    if (body) history.replaceState(null, '', place);
    if (reply.status === 200) put(text, keep);
  } catch {
    if (running === mine && !timed && !leaving) location.assign(url); // the whole page shows the error
  } finally {
    if (running === mine) { running = null; element.classList.remove('waiting'); }
  }
};
const addressOf = (form) => {
  const values = [...new FormData(form)].filter(([, value]) => value !== '');
  return `${location.pathname}?${new URLSearchParams(values)}`;
};

// New content replaces the old content part by part, where they differ. Open details remain open; the focused element keeps
// the focus and the text typed meanwhile.
const nameOf = (one) => one.id || (one.name && `${one.name}=${/radio|submit/.test(one.type) ? one.value : ''}`) || one.getAttribute('href');
const put = (text, keep) => {
  const made = document.createElement('template');
  made.innerHTML = text;
  const now = made.content.firstElementChild, field = document.activeElement, { value, selectionStart } = field;
  const scrolled = [...element.querySelectorAll('.wide')].map((one) => [one.scrollLeft, one.scrollTop]);
  const open = [...element.querySelectorAll('details[open] > summary')].map((one) => one.textContent);
  for (const one of now.querySelectorAll('details > summary')) {
    if (open.includes(one.textContent)) one.parentElement.open = true;
  }
  for (const one of element.querySelectorAll('[method=post] :is(input, textarea)')) { // what is typed is sent by a button
    const next = now.querySelector(`[method=post] [name="${CSS.escape(one.name)}"]`);
    if (next && one.value !== one.defaultValue) next.value = one.value;
  }
  swap(shown(), now);
  element.querySelectorAll('.wide').forEach((one, at) => one.scrollTo(...(scrolled[at] ?? [0, 0])));
  if (field.isConnected || !nameOf(field)) return;
  const again = [...element.querySelectorAll('a, button, input, select, textarea')].find((one) => nameOf(one) === nameOf(field));
  again?.focus({ preventScroll: true });
  if (!keep || !/^(text|search|textarea)$/.test(again?.type)) return;
  again.value = value;
  again.setSelectionRange(selectionStart, selectionStart);
};
const swap = (old, now) => {
  if (old.isEqualNode(now)) return;
  const parts = [...now.children];
  if (!old.matches('.shown, .drafting') || old.children.length !== parts.length) { old.replaceWith(now); return; }
  Object.assign(old.dataset, now.dataset);
  [...old.children].forEach((part, at) => swap(part, parts[at]));
};

element.addEventListener('click', (event) => {
  const copied = event.target.closest('[data-copy]'), link = event.target.closest('a'), figure = event.target.closest('figure[data-at]');
  if (copied) {
    const said = copied.textContent;
    navigator.clipboard.writeText(copied.dataset.copy).then(() => {
      copied.textContent = 'Copied';
      setTimeout(() => { copied.textContent = said; }, 1500);
    });
  } else if (link) {
    if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
    if (link.origin !== location.origin || link.pathname !== location.pathname) return;
    event.preventDefault();
    load(link.href, { push: true, keep: false });
  } else if (figure && event.target.closest('svg')) { // a click on a curve; `nearest` is in posttrain/reports/hover.js
    const url = new URL(figure.dataset.at + nearest(figure, event).x, location.href);
    url.pathname === location.pathname ? load(url, { push: true }) : location.assign(url);
  }
});
element.addEventListener('submit', (event) => {
  event.preventDefault();
  const form = event.target, by = event.submitter;
  if (!by?.value) load(addressOf(form), { push: true });
  else load(form.getAttribute('action'), { body: new URLSearchParams(new FormData(form, by)) });
});
// Search fields are read while typing. Their change event adds nothing, and would replace a button that is being pressed.
element.addEventListener('change', ({ target }) => {
  if (target.isConnected && target.form?.getAttribute('method') === 'get' && target.type !== 'search') load(addressOf(target.form), { push: true });
});
element.addEventListener('input', ({ target }) => {
  if (target.type !== 'search' || target.form?.getAttribute('method') !== 'get') return;
  clearTimeout(typing);
  typing = setTimeout(() => { // by then the field may have been replaced
    const form = element.querySelector(`[name="${CSS.escape(target.name)}"]`)?.form;
    if (form) load(addressOf(form), { push: true });
  }, 400);
});
window.addEventListener('beforeunload', () => { leaving = true; });
window.addEventListener('popstate', () => load(location.href, { keep: false }));
setInterval(() => { if (!document.hidden && !running) load(location.href, { timed: true }); }, 1000 * element.dataset.seconds);
