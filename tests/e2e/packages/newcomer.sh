# A host on which the files of a release lie in the current folder. apt and gpg ask no questions and write to one stream.
set -eu
cd /srv/now
mkdir dist
cp $(find apt -name '*_amd64.deb') dist/
ln dist/*.deb .
ln -s /run/here/server server
rm -f /etc/apt/sources.list /etc/apt/sources.list.d/*
mkdir -p /etc/apt/keyrings
echo 'APT::Get::Assume-Yes "true";' >/etc/apt/apt.conf.d/yes
apt() { /usr/bin/apt "$@" 2>&1; }
gpg() { /usr/bin/gpg --batch "$@" 2>&1; }
