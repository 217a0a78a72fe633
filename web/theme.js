// Sets the colours before the first paint: `data-theme` on the root selects the colour set, so that the style sheet defines each set once. This is
// the only script that blocks the page. `window.theme` reads and changes the choice; the event `theme` reports changes.

(() => {
  const KEY = 'braid-theme';
  const CHOICES = ['auto', 'light', 'dark'];
  const system = matchMedia('(prefers-color-scheme: dark)');
  let choice = 'auto';
  const show = () => {
    document.documentElement.dataset.theme = choice === 'auto' ? (system.matches ? 'dark' : 'light') : choice;
    dispatchEvent(new Event('theme'));
  };
  try {
    const kept = localStorage.getItem(KEY);
    if (CHOICES.includes(kept)) choice = kept;
  } catch {
    // If the browser stores nothing for this page, the choice lasts until the page is closed.
  }
  window.theme = {
    choice: () => choice,
    next() {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // As above.
      }
      show();
    },
  };
  system.addEventListener('change', show);
  addEventListener('storage', (event) => {
    if (event.key !== KEY || !CHOICES.includes(event.newValue)) return;
    choice = event.newValue;
    show();
  });
  show();
})();
