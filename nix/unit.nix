# A unit of packaging/ as NixOS wants it, so that both have one definition: the settings of its sections [Unit] and [Service],
# each with its value, or with the list of several.
{ lib }: file:
let
  sections = lib.splitString "\n[" (builtins.readFile file);
  settingsOf = name:
    let
      section = lib.findFirst (lib.hasPrefix "${name}]\n") "" sections;
      found = map (builtins.match "([A-Za-z]+)=(.*)") (lib.splitString "\n" section);
    in
    lib.zipAttrsWith (_: values: if lib.length values == 1 then lib.head values else values)
      (map (setting: { ${lib.head setting} = lib.last setting; }) (lib.filter (line: line != null) found));
in
{
  unitConfig = removeAttrs (settingsOf "Unit") [ "Description" ];
  serviceConfig = settingsOf "Service";
}
