// The theme that was chosen last, before anything is drawn. This script runs while the head is read.
(() => {
  const theme = localStorage.getItem("corella.theme");
  if (theme === "light" || theme === "dark") {
    document.documentElement.dataset.theme = theme;
  }
})();
