// Before anything is painted: light or dark as it was chosen, else as the system has it.
let theme = null;
try {
  theme = localStorage.getItem("tegrad.theme");
} catch {
  // this browser keeps nothing
}
document.documentElement.dataset.theme = theme ?? "system";
