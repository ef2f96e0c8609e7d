// The theme that was chosen last, before anything is drawn. This script runs while the head is read.
(() => {
  let theme = null;
  try {
    theme = localStorage.getItem("corella.theme");
  } catch {
    // Without storage the page follows the system.
  }
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
})();
