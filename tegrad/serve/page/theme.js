// Before anything is painted: light or dark as it was chosen, else as the system has it.
document.documentElement.dataset.theme = localStorage.getItem("tegrad.theme") ?? "system";
