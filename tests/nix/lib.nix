# The functions of nixpkgs' lib that nix/ calls, as far as it needs them: tests/test_nix.py evaluates without nixpkgs.
let
  inherit (builtins) all attrNames concatLists concatMap elemAt filter head isAttrs isList length mapAttrs stringLength;
  inherit (builtins) substring toJSON zipAttrsWith;
  tagged = kind: value: isAttrs value && (value._type or null) == kind;

  attributes = value: isAttrs value && !(value ? outPath);

  # Definitions of an attribute set, with conditions moved to its attributes: which there are depends on no condition then.
  pushed = value:
    if tagged "merge" value then concatMap pushed value.content
    else if tagged "if" value
    then map (mapAttrs (_: content: value // { inherit content; })) (pushed value.content)
    else [ value ];
  # Definitions of one value, those left out whose condition does not hold.
  held = value:
    if tagged "merge" value then concatMap held value.content
    else if tagged "if" value then (if value.condition then held value.content else [ ])
    else [ value ];
  # What several definitions of one value come to.
  resolved = values:
    let
      found = concatMap held values;
      firm = filter (value: !(tagged "default" value)) found;
      chosen = if firm == [ ] then map (value: value.content) found else firm;
    in
    if all attributes chosen then zipAttrsWith (_: resolved) chosen
    else if length chosen > 1 && all isList chosen then concatLists chosen
    else if all (value: value == head chosen) chosen then head chosen
    else throw "several definitions: ${toJSON chosen}";
  # Each option's value; a definition without an option is an error.
  valued = options: definitions:
    let
      sets = concatMap pushed definitions;
      unknown = filter (name: !(options ? ${name})) (concatMap attrNames sets);
      valueOf = name: option:
        let given = concatMap (set: if set ? ${name} then [ set.${name} ] else [ ]) sets; in
        if !(tagged "option" option) then valued option given
        else resolved (given ++ (if option ? default then [ { _type = "default"; content = option.default; } ] else [ ]));
    in
    if unknown != [ ] then throw "no option ${head unknown}" else mapAttrs valueOf options;
  lib = rec {
    inherit (builtins) concatMap elem filter head length match zipAttrsWith;
    last = list: elemAt list (length list - 1);
    optional = condition: value: if condition then [ value ] else [ ];
    optionalAttrs = condition: value: if condition then value else { };
    findFirst = wanted: default: list: let found = filter wanted list; in if found == [ ] then default else head found;
    hasPrefix = prefix: text: substring 0 (stringLength prefix) text == prefix;
    removePrefix = prefix: text:
      if hasPrefix prefix text then substring (stringLength prefix) (stringLength text) text else text;
    splitString = separator: text:
      filter builtins.isString (builtins.split (builtins.replaceStrings [ "[" "." ] [ "\\[" "\\." ] separator) text);
    getLib = package: package.lib or package.out;
    licenses.mit = "mit";

    mkOption = option: option // { _type = "option"; };
    mkEnableOption = text: mkOption { default = false; description = text; };
    mkIf = condition: content: { _type = "if"; inherit condition content; };
    mkMerge = content: { _type = "merge"; inherit content; };
    mkDefault = content: { _type = "default"; inherit content; };
    types = { attrsOf = _: { }; listOf = _: { }; nullOr = _: { }; anything = { }; bool = { }; package = { }; str = { }; };

    # One fixed point of all modules' options and definitions. Unlike nixpkgs' own it checks names, not types.
    evalModules = { modules, specialArgs }:
      let
        read = module: if builtins.isPath module then read (import module)
          else if builtins.isFunction module then module (specialArgs // { inherit lib config; }) else module;
        loaded = map read modules;
        together = one: other: one // mapAttrs
          (name: value: if one ? ${name} && !(tagged "option" value) then together one.${name} value else value) other;
        options = builtins.foldl' together { } (map (module: module.options or { }) loaded);
        config = valued options (map (module: module.config or { }) loaded);
      in
      { inherit config; };
  };
in
lib
