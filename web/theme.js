// The colours, before anything is painted: `data-theme` on the root says which, and the style sheet needs to hold each set once. The only
// script that the page waits for. `window.theme` reads and changes the choice; the event `theme` tells of every change.

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
    // A browser that keeps nothing for pages lets the choice last as long as the page.
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
