package controllers

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strconv"
	"sync"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
	appsac "k8s.io/client-go/applyconfigurations/apps/v1"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	metav1ac "k8s.io/client-go/applyconfigurations/meta/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"

	sales "flashsale.dev/operator/api/v1alpha1"
	"flashsale.dev/operator/controllers/plan"
)

const (
	fieldOwner = client.FieldOwner("flashsale-manager")
	// reapplyAfter is how long an unchanged child is left alone; what somebody changed by hand is mended within it.
	reapplyAfter = 30 * time.Second

	apiPort, adminPort = 8080, 9090
	secretPath         = "/etc/flashsale/database"
)

// ManagedLabel marks the controller's children; its cache holds no others.
var ManagedLabel = map[string]string{"app.kubernetes.io/managed-by": "flashsale"}

func reserverName(sale *sales.FlashSale) string { return sale.Name + "-reserver" }
func sweeperName(sale *sales.FlashSale) string  { return sale.Name + "-sweeper" }

// child is one object that a running sale needs.
type child struct {
	name  string
	empty func() client.Object
	want  runtime.ApplyConfiguration
}

func (s *scope) children() []child {
	deployment := func() client.Object { return &appsv1.Deployment{} }
	service := func() client.Object { return &corev1.Service{} }
	return []child{
		{sweeperName(s.sale), deployment, s.sweeper()},
		{reserverName(s.sale), deployment, s.reserver()},
		{reserverName(s.sale), service, s.service()},
	}
}

// appliedChildren remembers what was applied when, by the child's UID-independent key.
type appliedChildren struct {
	mu   sync.Mutex
	last map[string]appliedChild
}

type appliedChild struct {
	want string
	at   time.Time
}

// fresh says whether this was applied a moment ago; if not, it counts as applied now.
func (a *appliedChildren) fresh(key, want string) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.last == nil {
		a.last = map[string]appliedChild{}
	}
	if l := a.last[key]; l.want == want && time.Since(l.at) < reapplyAfter {
		return true
	}
	a.last[key] = appliedChild{want, time.Now()}
	return false
}

func (a *appliedChildren) forget(key string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	delete(a.last, key)
}

// applyChildren makes the children that are wanted, or takes them away. What the API server refuses, or somebody else
// owns, becomes a fault of the sale; anything else is an error.
func (s *scope) applyChildren(ctx context.Context) error {
	for _, c := range s.children() {
		var err error
		if s.decision.Run {
			err = s.apply(ctx, c)
		} else {
			err = s.remove(ctx, c)
		}
		var taken *nameTakenError
		switch {
		case err == nil:
			continue
		case errors.As(err, &taken):
			s.seen.ChildFault = &plan.Fault{Reason: sales.ReasonNameConflict, Message: err.Error(), Person: true}
		case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err):
			s.seen.ChildFault = &plan.Fault{Reason: sales.ReasonApplyFailed, Message: err.Error(), Person: true}
		default:
			return err
		}
		wake := s.decision.Wake
		s.decide()
		s.decision.Wake = max(wake, 5*time.Second)
		return nil
	}
	return nil
}

type nameTakenError struct{ kind, name string }

func (e *nameTakenError) Error() string {
	return fmt.Sprintf("%s %s exists and belongs to somebody else: rename it, or give the sale another name", e.kind, e.name)
}

func (s *scope) apply(ctx context.Context, c child) error {
	want, err := json.Marshal(c.want)
	if err != nil {
		return fmt.Errorf("encoding %s: %w", c.name, err)
	}
	there := c.empty()
	kind := fmt.Sprintf("%T", there)[len("*v1."):]
	key := string(s.sale.UID) + "/" + kind + "/" + c.name
	name := client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}
	err = s.Get(ctx, name, there)
	if apierrors.IsNotFound(err) {
		// The cache holds the controller's own objects only: is the name free?
		s.applied.forget(key)
		err = s.Direct.Get(ctx, name, there)
	}
	if client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("looking for %s %s: %w", kind, c.name, err)
	}
	if err == nil && !ours(there, s.sale) {
		return &nameTakenError{kind, c.name}
	}
	if s.applied.fresh(key, string(want)) {
		return nil
	}
	if err := s.Apply(ctx, c.want, fieldOwner, client.ForceOwnership); err != nil {
		s.applied.forget(key)
		return fmt.Errorf("applying %s %s: %w", kind, c.name, err)
	}
	return nil
}

func (s *scope) remove(ctx context.Context, c child) error {
	there := c.empty()
	err := s.Get(ctx, client.ObjectKey{Namespace: s.sale.Namespace, Name: c.name}, there)
	if apierrors.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for %s: %w", c.name, err)
	}
	if !ours(there, s.sale) || !there.GetDeletionTimestamp().IsZero() {
		return nil
	}
	uid := there.GetUID()
	if err := s.Delete(ctx, there, client.PropagationPolicy(metav1.DeletePropagationBackground), client.Preconditions{UID: &uid}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("removing %s: %w", c.name, err)
	}
	return nil
}

// ours says that the object is the sale's own child.
func ours(o client.Object, sale *sales.FlashSale) bool {
	owner := metav1.GetControllerOf(o)
	return owner != nil && owner.UID == sale.UID
}

func (s *scope) owner() *metav1ac.OwnerReferenceApplyConfiguration {
	return metav1ac.OwnerReference().WithAPIVersion(sales.GroupVersion.String()).WithKind("FlashSale").
		WithName(s.sale.Name).WithUID(s.sale.UID).WithController(true).WithBlockOwnerDeletion(true)
}

func (s *scope) selector(component string) map[string]string {
	return map[string]string{"app.kubernetes.io/name": "flashsale", "app.kubernetes.io/instance": s.sale.Name, "app.kubernetes.io/component": component}
}

func (s *scope) labels(component string) map[string]string {
	labels := s.selector(component)
	maps.Copy(labels, ManagedLabel)
	return labels
}

func (s *scope) service() *corev1ac.ServiceApplyConfiguration {
	return corev1ac.Service(reserverName(s.sale), s.sale.Namespace).
		WithLabels(s.labels("reserver")).WithOwnerReferences(s.owner()).
		WithSpec(corev1ac.ServiceSpec().
			WithSelector(s.selector("reserver")).
			WithPorts(corev1ac.ServicePort().WithName("http").WithPort(80).WithTargetPort(intstr.FromString("http")).WithProtocol(corev1.ProtocolTCP)))
}

func (s *scope) reserver() *appsac.DeploymentApplyConfiguration {
	resources := s.sale.Spec.Reserver.Resources
	if resources == nil {
		resources = &corev1.ResourceRequirements{
			Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("64Mi")},
			Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("512Mi")},
		}
	}
	container := s.container("serve", *resources).
		WithArgs("serve", fmt.Sprintf("--listen=:%d", apiPort), fmt.Sprintf("--admin=:%d", adminPort)).
		WithPorts(corev1ac.ContainerPort().WithName("http").WithContainerPort(apiPort).WithProtocol(corev1.ProtocolTCP))
	return s.deployment(reserverName(s.sale), "reserver", s.sale.Spec.Reserver.Replicas, container)
}

func (s *scope) sweeper() *appsac.DeploymentApplyConfiguration {
	container := s.container("sweep", corev1.ResourceRequirements{
		Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("10m"), corev1.ResourceMemory: resource.MustParse("32Mi")},
		Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("128Mi")},
	}).WithArgs("sweep", fmt.Sprintf("--admin=:%d", adminPort),
		"--interval="+s.sale.Spec.Sweep.Interval.Duration.String(), "--batch-size="+strconv.Itoa(int(s.sale.Spec.Sweep.BatchSize)))
	return s.deployment(sweeperName(s.sale), "sweeper", 1, container)
}

// container is what both Deployments have in common. The database's credentials are mounted, never passed.
func (s *scope) container(name string, resources corev1.ResourceRequirements) *corev1ac.ContainerApplyConfiguration {
	image := s.sale.Spec.Reserver.Image
	if image == "" {
		image = s.Image
	}
	return corev1ac.Container().WithName(name).WithImage(image).WithImagePullPolicy(corev1.PullIfNotPresent).
		WithCommand("/reserver").
		WithEnv(corev1ac.EnvVar().WithName("FLASHSALE_SALE_ID").WithValue(string(s.sale.UID)),
			corev1ac.EnvVar().WithName("FLASHSALE_DATABASE").WithValue(secretPath)).
		WithPorts(corev1ac.ContainerPort().WithName("admin").WithContainerPort(adminPort).WithProtocol(corev1.ProtocolTCP)).
		WithReadinessProbe(probe("/readyz").WithPeriodSeconds(1).WithTimeoutSeconds(2)).
		WithLivenessProbe(probe("/healthz").WithPeriodSeconds(10).WithTimeoutSeconds(5).WithFailureThreshold(6)).
		WithResources(corev1ac.ResourceRequirements().WithRequests(resources.Requests).WithLimits(resources.Limits)).
		WithVolumeMounts(corev1ac.VolumeMount().WithName("database").WithMountPath(secretPath).WithReadOnly(true)).
		WithSecurityContext(corev1ac.SecurityContext().
			WithAllowPrivilegeEscalation(false).WithReadOnlyRootFilesystem(true).
			WithCapabilities(corev1ac.Capabilities().WithDrop("ALL")))
}

func probe(path string) *corev1ac.ProbeApplyConfiguration {
	return corev1ac.Probe().WithHTTPGet(corev1ac.HTTPGetAction().WithPath(path).WithPort(intstr.FromString("admin")))
}

func (s *scope) deployment(name, component string, replicas int32, container *corev1ac.ContainerApplyConfiguration) *appsac.DeploymentApplyConfiguration {
	return appsac.Deployment(name, s.sale.Namespace).
		WithLabels(s.labels(component)).WithOwnerReferences(s.owner()).
		WithSpec(appsac.DeploymentSpec().
			WithReplicas(replicas).
			WithRevisionHistoryLimit(2).
			WithSelector(metav1ac.LabelSelector().WithMatchLabels(s.selector(component))).
			WithStrategy(appsac.DeploymentStrategy().WithType(appsv1.RollingUpdateDeploymentStrategyType).
				WithRollingUpdate(appsac.RollingUpdateDeployment().WithMaxUnavailable(intstr.FromInt32(0)).WithMaxSurge(intstr.FromInt32(1)))).
			WithTemplate(corev1ac.PodTemplateSpec().
				WithLabels(s.labels(component)).
				WithSpec(corev1ac.PodSpec().
					WithContainers(container).
					WithAutomountServiceAccountToken(false).
					WithEnableServiceLinks(false).
					WithTerminationGracePeriodSeconds(30).
					WithSecurityContext(corev1ac.PodSecurityContext().
						WithRunAsNonRoot(true).WithRunAsUser(65532).WithRunAsGroup(65532).WithFSGroup(65532).
						WithSeccompProfile(corev1ac.SeccompProfile().WithType(corev1.SeccompProfileTypeRuntimeDefault))).
					WithVolumes(corev1ac.Volume().WithName("database").
						WithSecret(corev1ac.SecretVolumeSource().WithSecretName(s.sale.Spec.Database.SecretRef.Name).WithDefaultMode(0o440))))))
}
