"""The scripts that run when packages are installed and removed, for Debian's and for rpm's shell."""

from payload import USER

CACHE = "/var/cache/corella"

MAKE_USER = f"""\
getent passwd {USER} >/dev/null || useradd --system --user-group --no-create-home \\
    --home-dir {CACHE} --shell /usr/sbin/nologin {USER}
"""
# An installation does not start the service: that takes memory, and the administrator first configures a model.
RELOAD_UNITS = """\
if [ -d /run/systemd/system ]; then
    systemctl daemon-reload
fi
"""
SERVE_NEW_VERSION = """\
if [ -d /run/systemd/system ]; then
    systemctl try-restart corella.service
fi
"""
STOP = """\
if [ -d /run/systemd/system ]; then
    systemctl disable --now corella.socket corella.service
fi
"""
FORGET = f"""\
rm -rf {CACHE}
if getent passwd {USER} >/dev/null; then
    userdel {USER}
fi
"""


def when(condition, *steps):
    """Returns a shell script that runs the steps if a condition holds."""
    lines = "".join(steps).splitlines()
    return "\n".join([f"if {condition}; then", *(f"    {line}" for line in lines), "fi"]) + "\n"
