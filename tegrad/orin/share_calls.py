"""The TSG fd's calls about share tokens. Source: L4T r36.4.3 nvgpu, os/linux/ioctl_tsg.c."""

from __future__ import annotations

import errno

from tegrad.orin.files import Call, Table
from tegrad.orin.steps import needed, require
from tegrad.orin.tsg_calls import TsgFile
from tegrad.uapi import ioctls as io

MAX_TOKENS = 64
"""Tokens of one TSG that are not used yet: as many as there are subcontexts."""


def get_share_token(file: TsgFile, call: Call) -> None:
    """GET_SHARE_TOKEN: the source must have opened this TSG; both instances must live."""
    arg, tsg = call.arg, file.tsg
    require(arg.source_device_instance_id and arg.target_device_instance_id)
    require(arg.source_device_instance_id in tsg.instances)
    require(tsg.token_count < MAX_TOKENS, errno.ENOSPC)
    require(arg.target_device_instance_id in file.driver.instances)
    source = needed(file.driver.instances.get(arg.source_device_instance_id))
    arg.share_token = source.issue(tsg, arg.target_device_instance_id)


def revoke_share_token(file: TsgFile, call: Call) -> None:
    """REVOKE_SHARE_TOKEN: exactly this token of this TSG."""
    arg, tsg = call.arg, file.tsg
    require(arg.source_device_instance_id and arg.target_device_instance_id and arg.share_token)
    require(arg.source_device_instance_id in tsg.instances)
    source = needed(file.driver.instances.get(arg.source_device_instance_id))
    source.take(arg.share_token, arg.target_device_instance_id, tsg)


HANDLERS: Table = {
    io.NVGPU_TSG_IOCTL_GET_SHARE_TOKEN.request: get_share_token,
    io.NVGPU_TSG_IOCTL_REVOKE_SHARE_TOKEN.request: revoke_share_token,
}
